"""ResourceClaims on a real Kubernetes: its API server, scheduler and kubelet, and the kernel's device rules."""

import asyncio
import json
import os
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nri_gpu.dra.api_access import by_kubeconfig
from nri_gpu.dra.api_server import ApiServer, RefusedError
from tests.support.cluster import DAEMON, DRA, Cluster, Object, pod, wait_for
from tests.support.cluster_claims import (
    POOLS,
    DraCluster,
    check_slices,
    claim,
    claiming,
    devices,
    on_claim,
    shown,
)
from tests.support.daemon import FOUR_GPUS, TOPOLOGIES
from tests.support.errors import HarnessError

pytestmark = pytest.mark.cluster

ONE_GPU = FOUR_GPUS.read_text().partition("[[gpu]]\nindex = 1\n")[0]
HGX = TOPOLOGIES / "hgx-h100.toml"
UVM = 1510  # its major in these files
NUMA = "resource.kubernetes.io/numaNode"
WAITS = "cannot allocate all claims"
UNHEALTHY = "gpu.nri.io/unhealthy"


def gone(cluster: Cluster, name: str) -> None:
    wait_for(f"pod {name} to be gone", lambda: not cluster.get("pod", name), explain=lambda: cluster.said_of(name))


def environment(cluster: Cluster, name: str) -> dict[str, str]:
    """Of the pod's first process."""
    (pid,) = cluster.pids(name)
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def health(cluster: Cluster, name: str) -> list[tuple[str, bool]]:
    """What the pod's status says of each device of its claims, and whether it gives the XID as the reason."""
    (status,) = cluster.get("pod", name)["status"]["containerStatuses"]
    told = [each for resource in status.get("allocatedResourcesStatus", []) for each in resource["resources"]]
    return [(each["health"], "XID 79" in each.get("message", "")) for each in told]


@pytest.mark.short
def test_claims_get_what_they_ask_for_and_no_more(cluster: Cluster, dra: DraCluster) -> None:
    dra.run(HGX)
    assert sorted(each["name"] for each in dra.offered()) == [f"gpu-{number}" for number in range(8)]
    wait_for("status to say so", lambda: "publishes 8 devices" in cluster.nri_gpu("status").stdout, 5)
    wishes = {"one": "one GPU", "pair": "two linked GPUs", "large": "memory"}
    for name, wish in wishes.items():
        cluster.apply(*claiming(name, shown(wish)))
    cluster.apply(pod("none"))
    cluster.wait_running(*wishes, "none")
    granted = [cluster.minors(name) for name in wishes]
    assert [len(minors) for minors in granted] == [1, 2, 1]
    assert len(frozenset().union(*granted)) == 4
    assert cluster.minors("none") == frozenset()
    assert len(dra.held()) == 3

    cluster.apply(*claiming("rest", devices(count=5)))
    cluster.wait_said("rest", WAITS)
    dra.delete("pod", "pair")
    cluster.wait_phase("rest")
    assert len(cluster.minors("rest")) == 5
    assert cluster.minors("rest").isdisjoint(cluster.minors("one") | cluster.minors("large"))

    # A pod of another namespace that copies the variable is refused, and the event says why.
    marker = next((name, value) for name, value in environment(cluster, "one").items() if "NRI_GPU_CLAIM_" in name)
    thief = pod("thief")
    thief["spec"]["containers"][0]["env"] = [dict(zip(("name", "value"), marker, strict=True))]
    thief["metadata"]["namespace"] = "other"
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}}, thief)
    described = partial(cluster.kubectl, "describe", "pod", "thief", "-n", "other")
    wait_for("the thief to be refused", lambda: "nri-gpu" in described(), explain=described)
    assert not cluster.get("pod", "thief", "-n", "other")["status"]["containerStatuses"][0].get("started")

    dra.delete("pods", "--all", "-A")
    dra.wait_nothing_left()


def test_a_gpu_without_memory_ends_nobodys_scheduling(cluster: Cluster, dra: DraCluster) -> None:
    """As on GB10: the page's expression passes it over, and a claim for any GPU gets it."""
    dra.run(re.sub(r"(?m)^memory_bytes = .*\n", "", FOUR_GPUS.read_text(), count=1))
    dark = next(each["name"] for each in dra.offered() if "capacity" not in each)
    large = [f"large{number}" for number in range(3)]
    for name in large:
        cluster.apply(*claiming(name, shown("memory")))
        cluster.wait_phase(name)
    assert dark not in {f"gpu-{minor}" for name in large for minor in cluster.minors(name)}
    cluster.apply(*claiming("one-more", shown("memory")))
    cluster.wait_said("one-more", WAITS)
    cluster.apply(*claiming("any"))
    cluster.wait_phase("any")
    assert cluster.minors("any") == {int(dark.removeprefix("gpu-"))}


def neighbour(value: dict[str, Any]) -> Object:
    """A slice of another driver: a network card on that NUMA node, as Kubernetes' helpers publish it."""
    spec = {
        "driver": "nic.example.com",
        "nodeName": "node1",
        "pool": {"name": "node1", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "eth1", "attributes": {NUMA: value}}],
    }
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "nic"}, "spec": spec}


@pytest.mark.parametrize("lists", [False, True], ids=["numbers", "lists, too"])
def test_a_gpu_and_a_device_of_another_driver_on_one_numa_node(cluster: Cluster, dra: DraCluster, lists: bool) -> None:
    """With DRAListTypeAttributes and without, no slice is refused, and both drivers' devices can be compared."""
    selectors = [{"cel": {"expression": "device.driver == 'nic.example.com'"}}]
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "nic.example.com"}}
    gates = cluster.gated("DRAListTypeAttributes=true") if lists else nullcontext()
    with gates:
        try:
            dra.run()
            numbers = {each["name"]: each["attributes"][NUMA] for each in dra.offered()}
            assert numbers == {f"gpu-{minor}": {"int": minor // 2} for minor in range(4)}
            # The second node of a socket, as the helpers list it: its own first.
            cluster.apply(
                neighbour({"ints": [1, 7]} if lists else {"int": 1}), {**kind, "spec": {"selectors": selectors}}
            )
            both = devices()
            both["requests"].append({"name": "nic", "exactly": {"deviceClassName": "nic.example.com"}})
            both["constraints"] = [{"requests": ["gpu", "nic"], "matchAttribute": NUMA}]
            cluster.apply(claim("near", both), on_claim("near", "near"))

            def allocated() -> list[str]:
                status = cluster.get("resourceclaim", "near").get("status", {})
                return [each["device"] for each in status.get("allocation", {}).get("devices", {}).get("results", [])]

            wait_for("the claim", lambda: bool(allocated()), explain=lambda: cluster.said_of("near"))
            gpu, nic = sorted(allocated(), reverse=True)
            assert (gpu in ("gpu-2", "gpu-3"), nic) == (True, "eth1")
        finally:
            dra.delete("pods", "--all", "--grace-period=0", "--force")
            dra.delete("resourceslices/nic", "deviceclasses/nic.example.com", "--ignore-not-found")


def test_mig_devices(cluster: Cluster, dra: DraCluster) -> None:
    dra.run(TOPOLOGIES / "mig-a100.toml")
    cluster.apply(*claiming("slice", shown("a MIG device")), *claiming("other", shown("a MIG device")))
    cluster.apply(*claiming("whole"))
    cluster.check_mig()


def test_pods_and_containers_that_share_a_claim(cluster: Cluster, dra: DraCluster) -> None:
    dra.run()
    cluster.apply(claim("shared", devices(count=2)), on_claim("first", "shared", containers=("main", "side")))
    cluster.wait_phase("first")
    before = cluster.minors("first")
    assert len(before) == 2
    # The kubelet says nothing of this one: the claim is prepared already.
    cluster.apply(on_claim("second", "shared", containers=("main", "side")))
    cluster.wait_phase("second")
    for name in ("first", "second"):
        for container in ("main", "side"):
            assert cluster.minors(name, container=container) == before
    cluster.apply(*claiming("others", devices(count=2)))
    cluster.wait_phase("others")
    assert cluster.minors("others").isdisjoint(before)
    (own,) = set(dra.held()) - {"shared"}  # made by a template for one pod, and named by another one
    cluster.apply(on_claim("guest", own))
    cluster.wait_phase("guest")
    assert cluster.minors("guest") == cluster.minors("others")

    dra.delete("pod", "first")
    assert cluster.minors("second") == before
    dra.delete("resourceclaim", "shared", "--wait=false")  # while a pod still has it
    cluster.wait_phase("second")
    dra.delete("pods", "--all")
    dra.wait_nothing_left()


@pytest.mark.parametrize("gpu", [ONE_GPU, re.sub(r"(?m)^memory_bytes = .*\n", "", ONE_GPU)], ids=["", "no memory"])
def test_shares_of_a_gpu(cluster: Cluster, dra: DraCluster, gpu: str) -> None:
    dra.run(gpu, "[dra]\nreplicas = 2\n")
    for name in ("one", "two", "three"):
        cluster.apply(*claiming(name))

    def running() -> list[str]:
        return [each["metadata"]["name"] for each in cluster.get("pods") if each["status"]["phase"] == "Running"]

    wait_for("two of them to run", lambda: len(running()) == 2, explain=lambda: cluster.kubectl("get", "pods"))
    first, second = running()
    (third,) = {"one", "two", "three"} - {first, second}
    assert cluster.minors(first) == cluster.minors(second) == {0}
    cluster.wait_said(third, WAITS)
    dra.delete("pod", first)
    cluster.wait_phase(third)
    asked = devices()
    asked["requests"][0]["exactly"]["capacity"] = {"requests": {"shares": "2"}}
    cluster.apply(*claiming("whole", asked))
    cluster.wait_said("whole", WAITS)
    dra.delete("pod", second, third)
    cluster.wait_phase("whole")


def test_a_bad_gpu_keeps_claims_away_and_evicts_where_policy_stops(cluster: Cluster, dra: DraCluster) -> None:
    dra.run()
    cluster.apply(*claiming("first"))
    cluster.wait_phase("first")
    (minor,) = cluster.minors("first")
    bad = f"{FOUR_GPUS.read_text()}\n[[event]]\nat_s = 0.5\ngpu = {minor}\nxid = 79\n"

    cluster.stop(DAEMON)
    dra.run_daemon(bad)

    def wait_tainted(effect: str) -> None:
        dra.wait_devices(f"tainted {effect}", lambda _: dra.taints(f"gpu-{minor}").get(UNHEALTHY) == effect)

    wait_tainted("NoSchedule")
    cluster.apply(*claiming("rest", devices(count=3)))
    cluster.wait_phase("rest")
    assert cluster.minors("rest") == frozenset(range(4)) - {minor}
    cluster.apply(*claiming("none"))
    cluster.wait_said("none", WAITS)
    cluster.wait_phase("first")
    wait_for("the kubelet to say so, with the reason", lambda: ("Unhealthy", True) in health(cluster, "first"))
    assert health(cluster, "rest") == [("Healthy", False)] * 3
    assert " method=v1.DRAResourceHealth" in cluster.log(DRA)  # the newest that both know
    event = (
        rf"Warning +GPUUnavailable .* nri-gpu +GPU {minor} \(GPU-\S+\) is bad, and granted to no new container: XID 79"
    )
    cluster.wait_node_said(event)

    cluster.stop(DAEMON)
    dra.run_daemon(bad, '[health]\ncontainers = "stop"\n')
    wait_tainted("NoExecute")
    gone(cluster, "first")
    assert len(re.findall("GPUUnavailable", cluster.said_of_node())) == 1  # the next daemon's GPU is no other
    assert len(cluster.minors("rest")) == 3


def test_restarts_with_claims_alive(cluster: Cluster, dra: DraCluster) -> None:
    victims = (DRA, DAEMON, "containerd", "kubelet")
    dra.run()
    names = [f"pod-{number}" for number in range(4)]
    for name in names:
        cluster.apply(*claiming(name))
    cluster.wait_running(*names)
    before = {name: cluster.minors(name) for name in names}
    assert frozenset().union(*before.values()) == frozenset(range(4))

    for victim, name in zip(victims, names, strict=True):
        cluster.kill(victim)
        cluster.start(victim)
        cluster.wait_ready()
        os.kill(cluster.pids(name)[0], 9)
        cluster.wait_phase(name, restarts=1)
        assert {each: cluster.minors(each) for each in names} == before, victim
    # The kubelet deleted the slices at its start.
    dra.wait_devices("offered again", lambda found: len(found) == 4)
    cluster.apply(*claiming("next"))
    cluster.wait_said("next", WAITS)
    dra.delete("pod", names[0])
    cluster.wait_phase("next")
    assert cluster.minors("next") == before[names[0]]

    # A node that loses its power: nothing is prepared any more, and the kubelet prepares it again.
    cluster.kill_all()
    cluster.boot_again()
    kept = {**before, "next": before[names[0]]}
    for name in (*names[1:], "next"):
        cluster.wait_phase(name, restarts=2 if name in names else 1)
        assert cluster.minors(name) == kept[name]
    dra.delete("pods", "--all")
    dra.wait_nothing_left()


def test_a_gpu_of_a_pod_that_is_terminating_is_waited_for(cluster: Cluster, dra: DraCluster) -> None:
    """Deleted by force, it is gone for the scheduler at once, and on the node some seconds later."""
    dra.run(ONE_GPU)
    of_slow, slow = claiming("slow")
    slow["spec"]["terminationGracePeriodSeconds"] = 5
    slow["spec"]["containers"][0]["command"] = ["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
    cluster.apply(of_slow, slow)
    cluster.wait_phase("slow")
    dra.delete("pod", "slow", "--force", "--grace-period=0")
    cluster.apply(*claiming("next"))
    cluster.wait_phase("next")
    assert "FailedPrepareDynamicResources" not in cluster.said_of("next")
    (waited_ms,) = re.findall(r"ResourceClaim prepared .*elapsed_ms=(\d+).* name=next", cluster.log(DRA))
    assert int(waited_ms) > 1000


def test_other_ways_to_ask(cluster: Cluster, dra: DraCluster) -> None:
    """An extended resource, a pod for monitoring, a configuration, and what the driver refuses."""
    label = "resource.kubernetes.io/admin-access"
    cluster.kubectl("label", "namespace", "default", f"{label}=true")
    dra.run()
    cluster.apply(pod("old", 2))
    cluster.apply(*claiming("look", devices(config={"capabilities": ["utility"]})))
    cluster.apply(*claiming("monitor", shown("monitoring")))
    cluster.apply(*claiming("wrong", devices(config={"capabilities": ["compute", "telepathy"]})))
    cluster.wait_running("old", "look", "monitor")
    assert len(cluster.minors("old")) == 2
    assert len(cluster.minors("look") - cluster.minors("old")) == 1
    assert cluster.minors("monitor") == frozenset(range(4))
    # /dev/nvidia-uvm, without which nothing can be computed, is of the capability compute.
    uvm = {name: bool(cluster.minors(name, UVM)) for name in ("old", "look", "monitor")}
    assert uvm == {"old": True, "look": False, "monitor": False}
    cluster.wait_said("wrong", "telepathy")
    assert len(dra.held()) == 3
    cluster.kubectl("label", "namespace", "default", f"{label}-")
    dra.delete("pods", "--all")
    dra.wait_nothing_left()


def test_three_ways_to_one_node(cluster: Cluster, dra: DraCluster) -> None:
    dra.run(FOUR_GPUS, POOLS, "--kubelet")
    cluster.wait_allocatable(2)
    assert [each["name"] for each in dra.offered()] == ["gpu-2", "gpu-3"]
    cluster.apply(pod("annotated", annotations={"gpu.nri.io": "1"}))
    cluster.wait_phase("annotated")
    (minor,) = cluster.minors("annotated")
    dra.wait_devices("tainted", lambda _: dra.taints(f"gpu-{minor}") == {"gpu.nri.io/held": "NoSchedule"})
    cluster.apply(pod("counted", 2), *claiming("claiming"), *claiming("waiting"))
    cluster.wait_running("counted", "claiming")
    assert cluster.minors("counted") == {0, 1}
    assert cluster.minors("claiming") == {2, 3} - {minor}
    cluster.wait_said("waiting", WAITS)
    dra.delete("pod", "annotated")
    cluster.wait_phase("waiting")
    assert cluster.minors("waiting") == {minor}


def test_by_the_chart_with_its_rights_and_no_more(cluster: Cluster, dra: DraCluster, image: None) -> None:
    cluster.install(cluster.reach, kubelet={"enabled": False}, dra={"enabled": True})
    dra.wait_devices("offered", lambda found: len(found) == 4 and not any(each.get("taints") for each in found))
    cluster.apply(*claiming("train", devices(count=2)))
    cluster.wait_phase("train")
    assert len(cluster.minors("train")) == 2

    # The account's token writes for this node alone.
    check_slices(cluster, dra.kubeconfig(), "node2")
    dra.delete("pod", "train")

    # So it does with events, of which the driver writes one in series.
    cluster.apply(*claiming("wrong", devices(config={"capabilities": ["telepathy"]})))
    cluster.wait_said("wrong", "telepathy")
    cluster.wait_node_said(r"Warning +ClaimNotPrepared .* nri-gpu +a ResourceClaim was not prepared \(bad-request\)")
    asyncio.run(check_events(cluster, dra))
    dra.delete("pod", "wrong")


async def check_events(cluster: Cluster, dra: DraCluster) -> None:
    """What the API server lets the chart's account write: events of its node, in our name, and no others."""
    api = ApiServer(by_kubeconfig(dra.kubeconfig()))
    found = cluster.get("events.events.k8s.io")
    (ours,) = (each for each in found if each["reportingController"] == "nri-gpu")
    theirs = next(each for each in found if each["regarding"]["kind"] == "Node" and each != ours)
    event = {key: each for key, each in ours.items() if key not in ("metadata", "series")}

    async def create(name: str = "node1.new", namespace: str = "default", **changed: object) -> None:
        await api.create_event(namespace, {**event, "metadata": {"name": name}, **changed})

    series = {"series": {"count": 2, "lastObservedTime": event["eventTime"]}}
    await create()
    await api.patch_event("default", "node1.new", series)
    denied = "the driver on node node1 may write Events of nri-gpu that regard that Node only"
    for wrong in (
        {"regarding": {**ours["regarding"], "name": "node2"}},
        {"regarding": {"apiVersion": "v1", "kind": "Pod", "name": "node1", "namespace": "default"}},
        {"regarding": None},
        {"reportingController": "kubelet"},
    ):
        with pytest.raises(RefusedError, match=denied):
            await create("node1.wrong", **wrong)
    with pytest.raises(RefusedError, match=denied):
        await create("node2.new")
    with pytest.raises(RefusedError, match=denied):
        await api.patch_event("default", theirs["metadata"]["name"], series)
    with pytest.raises(RefusedError, match="forbidden"):
        await create(namespace="kube-system")
    core = {"apiVersion": "v1", "kind": "Event", "involvedObject": ours["regarding"], "reason": "x", "message": "x"}
    with pytest.raises(HarnessError, match='cannot create resource "events" in API group ""'):
        text = json.dumps({**core, "metadata": {"name": "node1.core"}})
        cluster.kubectl("--kubeconfig", str(dra.kubeconfig()), "create", "-f", "-", given=text)
    api.close()
