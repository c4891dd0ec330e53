"""GPUs go out of use on a real node: Jobs never come on them, and pods that have them keep them, crashing or not."""

from __future__ import annotations

import json

import pytest

from nri_gpu.dra.offered_devices import CORDONED
from tests.cluster.test_dra import ONE_GPU, WAITS
from tests.support.cluster import DAEMON, Cluster, Uses, jobs, pod, wait_for
from tests.support.cluster_claims import DraCluster, claiming, shown

pytestmark = pytest.mark.cluster

QUEUED = 60
POLICY = '[usage]\ndir = "/var/lib/nri-gpu"\n'


def crashing(name: str) -> dict[str, object]:
    """A pod that has one GPU, writes its number, and ends with an error each time."""
    made = pod(name, 1)
    made["spec"]["containers"][0]["command"] = ["sh", "-c", "ls /dev/nvidia[0-9]; sleep 1; exit 1"]
    return made


def crashes(cluster: Cluster, name: str) -> int:
    """How often it was started again; it is never failed by the kubelet."""
    found = cluster.get("pod", name)
    assert found["status"]["phase"] != "Failed", found["status"].get("message")
    return int(next((each["restartCount"] for each in found["status"].get("containerStatuses", [])), 0))


def gpu_of(cluster: Cluster, holder: str) -> str:
    """The UUID that a pod has, or that is reserved for it."""
    gpus = json.loads(cluster.nri_gpu("status", "-o", "json").stdout)["gpus"]
    return next((gpu["uuid"] for gpu in gpus if holder in {each["pod"] for each in gpu["holders"]}), "")


def cordon(cluster: Cluster, uuid: str) -> None:
    done = cluster.nri_gpu("cordon", uuid, "--why", "fan broken")
    assert done.returncode == 0, done


def test_a_pod_that_crashes_keeps_its_gpu_over_a_restart_of_the_kubelet_and_a_boot(cluster: Cluster) -> None:
    cluster.run_daemon(policy=POLICY)
    cluster.wait_allocatable(4)
    cluster.apply(crashing("crashing"))
    wait_for("its first crash", lambda: crashes(cluster, "crashing") >= 1)
    uuid = gpu_of(cluster, "crashing")
    cordon(cluster, uuid)
    for each in range(2):
        cluster.stop("kubelet")
        cluster.start("kubelet")
        before = crashes(cluster, "crashing")
        wait_for(f"crash {each} after a restart", lambda: crashes(cluster, "crashing") > before, 120)  # noqa: B023
        assert cluster.allocatable() == 4
    cluster.kill_all()
    cluster.boot_again()
    before = crashes(cluster, "crashing")
    wait_for("a crash after the boot", lambda: crashes(cluster, "crashing") > before, 180)
    assert gpu_of(cluster, "crashing") == uuid
    cluster.kubectl("delete", "pod", "crashing", "--grace-period=1")
    cluster.wait_allocatable(3)
    cluster.apply(pod("three", 3))
    cluster.wait_phase("three")
    assert cluster.nri_gpu("uncordon", uuid).returncode == 0
    cluster.wait_allocatable(4)


def test_no_job_comes_on_a_gpu_out_of_use_over_restarts(cluster: Cluster) -> None:
    """What ran there goes on. Whoever the scheduler sends there before it knows is made anew by its Job."""
    cluster.run_daemon(policy=POLICY)
    cluster.wait_allocatable(4)
    cluster.apply(pod("stays", 1))
    cluster.wait_phase("stays")
    minors = cluster.minors("stays")
    uuid = gpu_of(cluster, "stays")
    uses = Uses(cluster.folder / "record-cordon")
    queued = jobs([f"job-{number}" for number in range(QUEUED)], "")
    for job in queued:
        uses.written_by(job["spec"]["template"]["spec"], 0.5)
    cluster.apply(*queued)
    wait_for("the first Jobs to end", lambda: cluster.jobs_done() >= 4, 120)
    cordon(cluster, uuid)
    gpus = json.loads(cluster.nri_gpu("status", "-o", "json").stdout)["gpus"]
    index, other = next((gpu["place"], gpu["uuid"]) for gpu in gpus if gpu["uuid"] != uuid)
    cordon(cluster, other)
    wait_for("its Job to end", lambda: not gpu_held(cluster, other))
    done = len(uses.nodes())
    for victim in (DAEMON, "kubelet", "containerd"):
        before = cluster.jobs_done()
        cluster.kill(victim)
        cluster.start(victim)
        wait_for(f"Jobs after {victim}", lambda: cluster.jobs_done() >= before + 4, 120)  # noqa: B023
        assert cluster.get("pod", "stays")["status"]["phase"] == "Running", cluster.get("pod", "stays")["status"]
    wait_for("all Jobs to end", lambda: cluster.jobs_done() == QUEUED, 400)
    after = uses.nodes()[done:]
    assert after
    assert not [node for node in after if node.endswith(f"nvidia{index}")], (index, after)
    assert cluster.minors("stays") == minors


def gpu_held(cluster: Cluster, uuid: str) -> bool:
    gpus = json.loads(cluster.nri_gpu("status", "-o", "json").stdout)["gpus"]
    return any(gpu["uuid"] == uuid and gpu["holders"] for gpu in gpus)


@pytest.mark.short
def test_a_claim_keeps_its_gpu_over_a_boot_and_no_new_one_gets_it(cluster: Cluster, dra: DraCluster) -> None:
    """After the boot the kubelet prepares it again, of which nothing but the kept file knows."""
    dra.run(ONE_GPU, POLICY)
    cluster.apply(*claiming("one", shown("one GPU")))
    cluster.wait_phase("one")
    minors, uuid = cluster.minors("one"), gpu_of(cluster, "one")
    cordon(cluster, uuid)
    (name,) = (each["name"] for each in dra.offered())
    wait_for("its taint", lambda: dra.taints(name) == {CORDONED: "NoSchedule"})
    cluster.apply(*claiming("next", shown("one GPU")))
    cluster.wait_said("next", WAITS)
    cluster.kill_all()
    cluster.boot_again()
    cluster.wait_phase("one", restarts=1)
    assert cluster.minors("one") == minors
    dra.delete("pod", "one")
    wait_for("its end", lambda: not gpu_held(cluster, uuid))
    cluster.wait_said("next", WAITS)
    assert cluster.nri_gpu("uncordon", uuid).returncode == 0
    cluster.wait_phase("next")
