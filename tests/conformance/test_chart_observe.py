"""The chart's observer as a kubelet would make its pod, in both grades, beside containers that have GPUs."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, Final

import pytest

from nri_gpu.system.capabilities import CHOWN, DAC_READ_SEARCH, SYS_PTRACE
from nri_gpu.verify.oci_bundles import TASKS
from tests.conformance.test_chart import PROGRAM, Cluster, make_dev
from tests.conformance.test_stray import GRANTED, OTHER, TOPOLOGY, holder
from tests.support.cgroup import Cgroup
from tests.support.configmap import ConfigMapFolder
from tests.support.containerd import Containerd
from tests.support.cri import ContainerId
from tests.support.daemon import UUIDS
from tests.support.helm import documents
from tests.support.marks import on_newest
from tests.support.pods import ContainerSpec, PodSpec
from tests.support.waiting import wait_for

pytestmark = on_newest

# Prints each socket below the folders where the chart's mounts are. /proc is in its own root file system.
SOCKETS: Final = """
import os, stat
for top in ("/run", "/var", "/etc", "/host"):
    for folder, below, files in os.walk(top):
        below[:] = [each for each in below if each != "proc"]
        for path in (os.path.join(folder, name) for name in files):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                print(path)
"""


def install(node: Containerd, tmp_path: Path, *, nvml: bool) -> Cluster:
    rendered = documents(mode="observe", simulation=TOPOLOGY, observe={"nvml": nvml})
    (config,) = (each for each in rendered if each["kind"] == "ConfigMap")
    (kubelet := tmp_path / "pod-resources").mkdir()
    tasks = str(node.base / "state" / TASKS)
    return Cluster(
        node,
        rendered,
        ConfigMapFolder(tmp_path / "policy", config["data"]),
        make_dev(tmp_path),
        tmp_path,
        elsewhere={f"/run/containerd/{TASKS}": tasks, "/var/lib/kubelet/pod-resources": str(kubelet)},
    )


def given(node: Containerd, folder: Path) -> ContainerId:
    """A container that has GPU 0 by a device of its specification, as a device plugin gives it, and has it open."""
    os.mknod(device := folder / "nvidia0", stat.S_IFCHR | 0o666, os.makedev(*GRANTED))
    pod = node.cri.run_pod(PodSpec(name="train"))
    opens = ("/bin/sh", "-c", "exec sleep 3600 </dev/nvidia0")
    return node.cri.run(pod, ContainerSpec(command=opens, devices={"/dev/nvidia0": str(device)}))


@pytest.mark.parametrize("nvml", [False, True])
def test_it_sees_who_has_a_gpu_and_reaches_no_socket(node: Containerd, tmp_path: Path, nvml: bool) -> None:
    cluster, cri = install(node, tmp_path, nvml=nvml), node.cri
    train = given(node, tmp_path)
    privileged = cri.run_pod(PodSpec(name="notebook", privileged=True))
    cri.run(privileged, holder(OTHER, privileged=True))
    before = sorted(path.name for path in (node.base / "state").iterdir())
    observer = cluster.start("observe")
    cluster.wait_ready("observe", observer)
    assert cluster.probe("observe", observer, "livenessProbe") == 0

    def status() -> dict[str, Any]:
        said = cri.execute(observer, *PROGRAM, "status", "-o", "json")
        found: dict[str, Any] = json.loads(said.stdout)
        return found

    def seen() -> bool:
        observed = status()["observer"]
        return bool(observed and observed["allocations"] and observed["findings"])

    wait_for("what it sees", seen, 20, lambda: json.dumps(status()["observer"]))
    observed = status()["observer"]
    (allocation,) = (each for each in observed["allocations"] if each["container_id"] == train)
    assert (allocation["gpu_uuid"], allocation["pod"], allocation["opened"]) == (UUIDS[0], "train", True)
    rules_unseen = [each for each in observed["unseen"] if "device rules" in each and "observe.nvml=true" in each]
    assert bool(rules_unseen) is (node.cgroup is Cgroup.V2 and not nvml), observed["unseen"]
    (finding,) = (each for each in observed["findings"] if each["kind"] == "opened-by-privileged")
    assert "notebook" in json.dumps(finding)

    found = cri.execute(observer, PROGRAM[0], "-c", SOCKETS)
    # The file system of each container is mounted in its bundle, its own among them.
    sockets = {re.sub(f"^/run/containerd/{TASKS}/k8s.io/[0-9a-f]+/rootfs/", "/", each) for each in found.stdout.split()}
    assert sockets == {"/run/nri-gpu-observe/control.sock"}, found.stderr
    assert sorted(path.name for path in (node.base / "state").iterdir()) == before
    process = Path(f"/proc/{cri.status(observer).pid}")
    sets = dict(re.findall(r"Cap(Eff|Prm):\s+(\w+)", (process / "status").read_text()))
    assert int(sets["Eff"], 16) == (1 << CHOWN if nvml else 0)  # for control.group
    assert nvml or int(sets["Prm"], 16) == 1 << SYS_PTRACE | 1 << DAC_READ_SEARCH

    # No file system of a container outlives it in the observer's mounts.
    assert f"/{train}/rootfs" in (process / "mountinfo").read_text()
    cri.stop(train)
    cri.remove(train)
    assert train not in (process / "mountinfo").read_text()
