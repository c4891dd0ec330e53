"""A claim that is reserved for a PodGroup, on a real Kubernetes with the gates for it (KEP-5729)."""

import json
import os
from collections.abc import Iterator
from typing import Final

import pytest

from tests.cluster.test_dra import environment
from tests.support.cluster import DAEMON, DRA, Cluster, Object, pod, wait_for
from tests.support.cluster_claims import DraCluster, claim, devices, on_claim, template

pytestmark = pytest.mark.cluster

API: Final = "scheduling.k8s.io/v1beta1"
WORKERS: Final = ("worker-0", "worker-1", "worker-2")
NOT_LISTED: Final = "PodResources does not list it for this container"


@pytest.fixture
def gated(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with those gates, and afterwards as it was."""
    with cluster.gated("GenericWorkload=true,DRAWorkloadResourceClaims=true", f"--runtime-config={API}=true"):
        yield cluster


@pytest.fixture
def dra(gated: Cluster) -> Iterator[DraCluster]:
    made = DraCluster(gated)
    yield made
    # A claim goes after the group that it is reserved for, and a group after its pods.
    made.delete("pods,podgroups", "--all", "--timeout=60s")
    made.end()


def group(name: str, **claim_source: str) -> Object:
    """A PodGroup with one claim, which its pods call `gpus`."""
    spec = {"schedulingPolicy": {"basic": {}}, "resourceClaims": [{"name": "gpus", **claim_source}]}
    return {"apiVersion": API, "kind": "PodGroup", "metadata": {"name": name}, "spec": spec}


def in_group(made: Object, name: str) -> Object:
    made["spec"]["schedulingGroup"] = {"podGroupName": name}
    return made


def copying(name: str, marker: tuple[str, str]) -> Object:
    """A pod that names no claim and has the variable of one."""
    made = pod(name, annotations={"gpu.nri.io": "all"})
    made["spec"]["containers"][0]["env"] = [dict(zip(("name", "value"), marker, strict=True))]
    return made


def marker_of(cluster: Cluster, name: str) -> tuple[str, str]:
    return next(each for each in environment(cluster, name).items() if "NRI_GPU_CLAIM_" in each[0])


def reserved_for(cluster: Cluster) -> set[tuple[str, str]]:
    found = (each["status"].get("reservedFor", []) for each in cluster.get("resourceclaims"))
    return {(each["resource"], each["name"]) for those in found for each in those}


def kill_a_program(cluster: Cluster, name: str, times: int) -> None:
    """Its container starts again, for that many times in all."""
    os.kill(cluster.pids(name)[0], 9)
    cluster.wait_phase(name, restarts=times)


@pytest.mark.short
def test_the_pods_of_a_group_share_its_claim_and_others_have_nothing(gated: Cluster, dra: DraCluster) -> None:
    cluster = gated
    dra.run()
    cluster.apply(claim("shared", devices(count=2)), group("gang", resourceClaimName="shared"))
    cluster.apply(*(in_group(on_claim(name, "shared"), "gang") for name in WORKERS))
    cluster.wait_running(*WORKERS)
    assert reserved_for(cluster) == {("podgroups", "gang")}
    (minors,) = {cluster.minors(name) for name in WORKERS}
    assert len(minors) == 2
    assert "of PodGroup gang" in cluster.nri_gpu("status").stdout

    # One that names the group, one that is in none: both only copy the variable.
    marker = marker_of(cluster, WORKERS[0])
    cluster.apply(in_group(copying("liar", marker), "gang"), copying("thief", marker))
    # This one names the claim, so the scheduler reserves it for the pod, too.
    cluster.apply(on_claim("guest", "shared"))
    cluster.wait_phase("guest")
    assert cluster.minors("guest") == minors
    assert reserved_for(cluster) == {("podgroups", "gang"), ("pods", "guest")}
    for name in ("liar", "thief"):
        cluster.wait_said(name, NOT_LISTED)
        assert not cluster.get("pod", name)["status"]["containerStatuses"][0].get("started")
    dra.delete("pods", "guest", "liar", "thief")

    # Somebody of a kind that is not served: who runs keeps the claim.
    (found,) = cluster.get("resourceclaims")
    entry = {"resource": "jobs", "apiGroup": "batch", "name": "queue", "uid": "j-1"}
    reserved = [*found["status"]["reservedFor"], entry]
    patch = json.dumps({"status": {"reservedFor": reserved}})
    cluster.kubectl("patch", "resourceclaim", "shared", "--subresource=status", "--type=merge", "-p", patch)
    kill_a_program(cluster, WORKERS[0], 1)
    assert cluster.minors(WORKERS[0]) == minors
    # ... and a claim of such a one is not prepared.
    cluster.stop("kubelet")
    cluster.apply(claim("queued", devices()), on_claim("queued", "queued"))
    wait_for("it to be scheduled", lambda: ("pods", "queued") in reserved_for(cluster))
    patch = json.dumps(
        {"status": {"reservedFor": [*cluster.get("resourceclaim", "queued")["status"]["reservedFor"], entry]}}
    )
    cluster.kubectl("patch", "resourceclaim", "queued", "--subresource=status", "--type=merge", "-p", patch)
    cluster.start("kubelet")
    cluster.wait_said("queued", "it is reserved for jobs.batch, and only pods and PodGroups are served here")
    assert dra.held() == ["shared"]
    for name, entries in (("shared", found["status"]["reservedFor"]), ("queued", [])):
        patch = json.dumps({"status": {"reservedFor": entries}})
        cluster.kubectl("patch", "resourceclaim", name, "--subresource=status", "--type=merge", "-p", patch)


def test_a_group_outlives_restarts_and_ends_with_all_that_it_had(gated: Cluster, dra: DraCluster) -> None:
    cluster = gated
    dra.run()
    cluster.apply(template("gpus", devices()), group("gang", resourceClaimTemplateName="gpus"))
    cluster.apply(*(in_group(on_claim(name, "gpus", by_template=True), "gang") for name in WORKERS))
    cluster.wait_running(*WORKERS)
    (made,) = cluster.get("resourceclaims")
    assert made["metadata"]["ownerReferences"][0]["kind"] == "PodGroup"
    (minors,) = {cluster.minors(name) for name in WORKERS}
    assert len(minors) == 1

    for times, victim in enumerate((DRA, DAEMON, "containerd", "kubelet"), start=1):
        cluster.kill(victim)
        cluster.start(victim)
        cluster.wait_ready()
        kill_a_program(cluster, WORKERS[0], times)
        assert {cluster.minors(name) for name in WORKERS} == {minors}, victim
        assert cluster.nri_gpu("status").returncode == 0
    cluster.apply(in_group(on_claim("late", "gpus", by_template=True), "gang"))
    cluster.wait_phase("late")
    assert cluster.minors("late") == minors

    # The node loses its power: nothing is prepared, and the group's pods are not known any more.
    cluster.kill_all()
    cluster.boot_again()
    for name in (*WORKERS, "late"):
        cluster.wait_phase(name, restarts=5 if name == WORKERS[0] else 1)
        assert cluster.minors(name) == minors

    dra.delete("podgroup", "gang", "--wait=false")
    dra.delete("pods", "--all")
    wait_for("the claim to go with its group", lambda: not cluster.get("resourceclaims"))
    dra.wait_nothing_left()
