"""What a node offers to the scheduler: names, attributes, order, taints, shares and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import ContainerId, PodUid
from nri_gpu.domain.gpu import Cordon, Fabric, FabricState, Gpu, MigEngines
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.health import Health, HealthState
from nri_gpu.domain.node import GpuFault, Inventory, Link
from nri_gpu.domain.resource_claim import ClaimedDevice, ClaimUid, PreparedClaim, device_name
from nri_gpu.dra.offered_devices import CounterSets, conditions, not_ready, offer
from nri_gpu.dra.questions import Capacity, GpuCondition, OfferedDevice, Taint, Version
from nri_gpu.inventory.topology_file import load_topology
from nri_gpu.ledger.events import DevicesAllocated
from nri_gpu.ledger.ledger import Entry, Ledger
from nri_gpu.policy.dra_settings import DraSettings
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from tests.support import builders as make
from tests.support.daemon import TOPOLOGIES
from tests.support.ledgers import after

MIB: Final = make.MIB
CLUSTER: Final = "01234567-89ab-cdef-0123-456789abcdef"


def offered(
    gpus: Sequence[Gpu] | Inventory,
    ledger: Ledger | None = None,
    policy: Policy | None = None,
    settings: DraSettings | None = None,
    hindrance: str = "",
) -> tuple[tuple[OfferedDevice, ...], CounterSets]:
    node = make.node([])
    node = replace(node, inventory=gpus if isinstance(gpus, Inventory) else make.inventory(gpus))
    return offer(node, ledger or Ledger(), policy or Policy.default(), settings or DraSettings(), hindrance)


def taints(gpu: Gpu, ledger: Ledger | None = None, policy: Policy | None = None, replicas: int = 1) -> list[Taint]:
    ((device,), _) = offered([gpu], ledger, policy, DraSettings(replicas=replicas))
    return list(device.taints)


def claim(*uuids: str, mode: Mode = Mode.EXCLUSIVE, admin: bool = False) -> Ledger:
    devices = tuple(
        ClaimedDevice(request="r", pool="node", device="gpu-0", uuid=uuid, mode=mode, admin=admin)
        for uuid in map(type(make.uuid(0)), uuids)
    )
    uid = ClaimUid("claim-1")
    prepared = PreparedClaim(uid=uid, namespace="ml", name="one", pods={PodUid("p"): "p"}, devices=devices)
    return Ledger(claims={uid: prepared})


def test_a_gpu_has_the_names_that_selectors_of_nvidia_s_driver_use() -> None:
    gpu = make.gpu(
        1,
        brand="nvidia",
        architecture="ada-lovelace",
        addressing="hmm",
        numa_node=1,
        pcie_root="pci0000:c9",
        arch=(8, 9),
    )
    inventory = make.inventory([gpu], driver_version="580.95.05", cuda_version="13.0")
    ((device,), counter_sets) = offered(inventory)
    assert device == OfferedDevice(
        name="gpu-6",
        attributes={
            "type": "gpu",
            "uuid": gpu.uuid,
            "productName": "NVIDIA A100-SXM4-40GB",
            "brand": "Nvidia",
            "architecture": "Ada Lovelace",
            "addressingMode": "HMM",
            "resource.kubernetes.io/pciBusID": "0000:11:00.0",
            "resource.kubernetes.io/pcieRoot": "pci0000:c9",
            "cudaComputeCapability": Version("8.9.0"),
            "driverVersion": Version("580.95.5"),
            "cudaDriverVersion": Version("13.0.0"),
            "numaNode": 1,
            "resource.kubernetes.io/numaNode": 1,
        },
        capacity={"memory": Capacity(40_960 * MIB)},
    )
    assert counter_sets == {}


@pytest.mark.parametrize(("node", "published"), [(0, 0), (1023, 1023), (None, None)])
def test_the_numa_node_is_a_number_under_both_names_or_under_none(node: int | None, published: int | None) -> None:
    """By Kubernetes' own name `matchAttribute` compares it with other drivers' devices; all without one would match."""
    inventory = make.inventory((make.gpu(0, numa_node=node), make.mig_gpu(1, ["1g.5gb"], numa_node=node)))
    devices, _ = offered(inventory)
    assert len(devices) == 2
    for name in ("numaNode", "resource.kubernetes.io/numaNode"):
        assert [device.attributes.get(name) for device in devices] == [published] * 2


def test_what_selectors_name_is_there_also_where_it_is_not_known() -> None:
    ((device,), _) = offered([make.gpu(0, arch=None, brand="a new one")])
    assert device.attributes == {
        "type": "gpu",
        "uuid": make.uuid(0),
        "productName": "NVIDIA A100-SXM4-40GB",
        "brand": "Unknown",
        "architecture": "Unknown",
        "cudaComputeCapability": Version("0.0.0"),
        "driverVersion": Version("0.0.0"),
        "cudaDriverVersion": Version("0.0.0"),
        "resource.kubernetes.io/pciBusID": "0000:10:00.0",
    }
    ((device,), _) = offered([make.gpu(0)])
    assert device.attributes["architecture"] == "Ampere"


def test_what_is_not_known_is_no_capacity_and_consumes_nothing() -> None:
    cut = make.mig_gpu(1, ["1g.5gb", "unknown"], memory_bytes=None)
    cut = replace(cut, mig=tuple(replace(each, memory_bytes=None) for each in cut.mig))
    devices, counter_sets = offered([make.gpu(0, memory_bytes=None), cut])
    assert [each.capacity for each in devices] == [{}, {}, {}]
    assert [(each.counter_set, each.counters) for each in devices] == [
        ("", {}),
        ("gpu-6-counter-set", {"slices": 1}),
        ("", {}),
    ]
    assert counter_sets == {"gpu-6-counter-set": {"slices": 7}}


def test_mig_devices_share_the_counters_of_their_gpu() -> None:
    profiles = ["1g.5gb+me", "3g.20gb", "1c.3g.20gb", "unknown"]
    cut = make.mig_gpu(0, profiles)
    cut = replace(cut, mig=tuple(replace(each, engines=MigEngines(14, 1, 2, 0, 3, 4)) for each in cut.mig))
    devices, counter_sets = offered([make.gpu(1), cut])
    assert [each.name for each in devices] == [
        "gpu-6",
        "gpu-7-mig-1g5gb-me-7-0",
        "gpu-7-mig-3g20gb-8-0",
        "gpu-7-mig-unknown-10-0",
    ]
    memory = 4_864 * MIB
    assert counter_sets == {"gpu-7-counter-set": {"memory": cut.memory_bytes, "slices": 7}}
    assert [each.counter_set for each in devices] == ["", *["gpu-7-counter-set"] * 3]
    assert [each.counters for each in devices[1:]] == [
        {"memory": memory, "slices": 1},
        {"memory": memory, "slices": 3},
        {"memory": memory},
    ]
    assert devices[2].attributes["type"] == "mig"
    assert devices[2].attributes["parentUUID"] == cut.uuid
    assert devices[2].attributes["profile"] == "3g.20gb"
    engines = {"multiprocessors": 14, "copyEngines": 1, "decoders": 2, "encoders": 0, "jpegEngines": 3, "ofaEngines": 4}
    assert devices[2].capacity == {name: Capacity(amount) for name, amount in ({"memory": memory} | engines).items()}


def test_counters_never_keep_a_mig_device_from_use_that_was_made() -> None:
    cut = make.mig_gpu(0, ["4g.20gb", "4g.20gb"], memory_bytes=MIB)
    assert offered([cut])[1] == {"gpu-7-counter-set": {"memory": 2 * 4_864 * MIB, "slices": 8}}


def test_shared_devices_are_consumed_in_parts() -> None:
    devices, counter_sets = offered([make.gpu(0), make.mig_gpu(1)], settings=DraSettings(replicas=4))
    assert all(each.shared for each in devices)
    assert [each.capacity["memory"].share for each in devices] == [40_960 * MIB // 4, *[4_864 * MIB // 4] * 2]
    assert counter_sets == {}
    assert all(each.counter_set == "" and each.counters == {} for each in devices)


def test_a_shared_device_has_as_many_shares_as_replicas_whatever_is_known_of_it() -> None:
    devices, _ = offered(
        [make.gpu(0), make.gpu(1, memory_bytes=None), make.mig_gpu(2)], settings=DraSettings(replicas=3)
    )
    assert [each.capacity["shares"] for each in devices] == [Capacity(3, 1)] * 4
    assert list(devices[1].capacity) == ["shares"]


def test_only_the_pool_s_gpus() -> None:
    policy = parse_policy({"pool": [{"name": "a", "device": ["1", "2:1"]}]}, "p.toml")
    node = [make.gpu(0), make.gpu(1), make.mig_gpu(2)]
    devices, _ = offered(node, policy=policy, settings=DraSettings(pool="a"))
    assert [each.attributes["uuid"] for each in devices] == [make.uuid(1), make.mig_uuid(2, 1)]


BAD: Final = Health(HealthState.BAD, 1.0, "XID 79")
STOPPING: Final = parse_policy({"health": {"containers": "stop"}}, "p.toml")
UNHEALTHY: Final[dict[str, tuple[Gpu, Policy | None, tuple[str, str] | None]]] = {
    "healthy": (make.gpu(), None, None),
    "suspect": (make.gpu(health=Health(HealthState.SUSPECT)), STOPPING, None),
    "bad": (make.gpu(health=BAD, unavailable="XID 79"), None, ("bad", "NoSchedule")),
    "bad, and containers stopped": (make.gpu(health=BAD, unavailable="XID 79"), STOPPING, ("bad", "NoExecute")),
    "recovering": (make.gpu(health=Health(HealthState.RECOVERING)), None, ("recovering", "NoSchedule")),
    "not to be described": (make.gpu(unavailable="lost"), STOPPING, ("unavailable", "NoSchedule")),
}


@pytest.mark.parametrize(("gpu", "policy", "expected"), UNHEALTHY.values(), ids=UNHEALTHY)
def test_unhealthy_gpus_are_tainted(gpu: Gpu, policy: Policy | None, expected: tuple[str, str] | None) -> None:
    assert taints(gpu, policy=policy) == ([Taint("gpu.nri.io/unhealthy", *expected)] if expected else [])


CONDITIONS: Final = {
    "healthy": (make.gpu(), ("", "", None)),
    "suspect, and granted": (make.gpu(health=Health(HealthState.SUSPECT, 1.0, "XID 78")), ("", "", None)),
    "bad, with its health's own reason": (
        make.gpu(health=BAD, unavailable="bad since 2027: XID 79"),
        ("bad", "XID 79", 1.0),
    ),
    "not to be described": (make.gpu(unavailable="lost"), ("unavailable", "lost", None)),
    "in MIG mode": (make.mig_gpu(0), ("", "", None)),
    "in MIG mode, and bad": (make.mig_gpu(0, health=BAD, unavailable="XID 79"), ("bad", "XID 79", 1.0)),
}


@pytest.mark.parametrize(("gpu", "expected"), CONDITIONS.values(), ids=CONDITIONS)
def test_a_condition_of_a_gpu_is_whether_it_can_be_granted(gpu: Gpu, expected: tuple[str, str, float | None]) -> None:
    assert conditions(make.inventory([gpu])) == (GpuCondition(gpu.uuid, 0, *expected),)


def test_a_gpu_that_nvml_cannot_describe_has_a_condition_where_its_uuid_is_known() -> None:
    faults = (GpuFault(2, "GPU is lost", uuid=make.uuid(2)), GpuFault(3, "no permission"))
    found = conditions(replace(make.inventory([make.gpu()]), faults=faults))
    assert found[1:] == (GpuCondition(make.uuid(2), 2, "unavailable", "GPU is lost"),)


def test_a_device_that_no_claim_can_have_says_why() -> None:
    devices, _ = offered([make.gpu(0), make.gpu(1, unavailable="GPU is lost"), make.mig_gpu(2, unavailable="XID 79")])
    assert [each.fault for each in devices] == ["", "GPU is lost", *["XID 79"] * (len(devices) - 2)]


def test_a_device_says_that_a_claim_was_prepared_with_another_gpu_of_its_name() -> None:
    """The kubelet knows names alone, and would call the claim's GPU healthy."""
    swapped = claim(make.uuid(9))  # as gpu-0
    (one, other), _ = offered([make.gpu(7), make.gpu(0)], swapped)
    assert (one.name, one.taints) == ("gpu-0", ())
    assert one.fault == f"claim ml/one has {make.uuid(9)}, which was gpu-0 before: delete the pods of that claim"
    assert other.fault == ""
    for ledger in (claim(make.uuid(7)), claim(make.uuid(9), admin=True)):
        ((same,), _) = offered([make.gpu(7)], ledger)
        assert same.fault == ""


def held(by: str) -> Taint:
    return Taint("gpu.nri.io/held", by, "NoSchedule")


GRANTED: Final = make.ledger(make.entry(0))
SHARED: Final = make.ledger(make.entry(0, mode=Mode.SHARED))
RESERVED: Final = after(Ledger(), DevicesAllocated(1.0, (AllocatedDevice("nvidia.com/gpu", make.uuid(0)),)))
OURS: Final = claim(make.uuid(0))
SHARING: Final = claim(make.uuid(0), mode=Mode.SHARED)


def sharing(*pods: str) -> Mapping[ContainerId, Entry]:
    """A container of each pod, which shares the GPU."""
    entries = (make.entry(0, mode=Mode.SHARED, to=make.container(of=make.pod(name, uid=name))) for name in pods)
    return make.ledger(*entries).entries


HELD: Final[dict[str, tuple[Ledger, int, list[Taint]]]] = {
    "by a container": (GRANTED, 1, [held("container")]),
    "by a container, where claims share": (GRANTED, 4, [held("container")]),
    "shared, where claims do not": (SHARED, 1, [held("container")]),
    "shared, where claims do": (SHARED, 4, []),
    "by as many containers as may share it": (Ledger(sharing("a", "b")), 2, [held("container")]),
    "shared by a claim and its container": (replace(SHARING, entries=sharing("p")), 2, []),
    "shared by a claim and, as the last, a container": (replace(SHARING, entries=sharing("a")), 2, [held("container")]),
    "shared by a claim and a container": (replace(SHARING, entries=sharing("a")), 3, []),
    "by another component": (make.ledger(others=[make.foreign(0)]), 4, [held("other-component")]),
    "watched by a monitor": (make.ledger(others=[replace(make.foreign(0), watched=frozenset({make.uuid(0)}))]), 1, []),
    "by a container, beside another component's": (
        make.ledger(make.entry(0), others=[make.foreign(0)]),
        1,
        [held("several-pods")],
    ),
    "by a claim, beside another component's": (
        OURS.with_all_external(make.ledger(others=[make.foreign(0)]).external),
        1,
        [held("several-pods")],
    ),
    "by the device plugin": (RESERVED, 1, [held("device-plugin")]),
    "by a claim": (OURS, 1, []),
    "by a claim's container": (replace(OURS, entries=GRANTED.entries), 1, []),
    "by a container, and watched by a claim": (
        replace(claim(make.uuid(0), admin=True), entries=GRANTED.entries),
        1,
        [held("container")],
    ),
}


@pytest.mark.parametrize(("ledger", "replicas", "expected"), HELD.values(), ids=HELD)
def test_gpus_that_others_hold_are_tainted(ledger: Ledger, replicas: int, expected: list[Taint]) -> None:
    assert taints(make.gpu(0), ledger, replicas=replicas) == expected


def test_every_device_is_tainted_while_nothing_could_be_granted() -> None:
    devices, _ = offered(make.gpus(), hindrance="no-runtime")
    assert {each.taints for each in devices} == {(Taint("gpu.nri.io/node-not-ready", "no-runtime", "NoSchedule"),)}


def test_what_keeps_a_node_from_granting() -> None:
    node, policy = make.node(), Policy.default()
    broken = replace(policy, fault="policy.toml: is not TOML")
    strict = parse_policy({"inventory": {"stale": "refuse", "stale_after_s": 60}}, "p.toml")
    ready = replace(node, module_version="580.95.05")
    assert not_ready(ready, policy, connected=True) == ""
    assert not_ready(ready, policy, connected=False) == "no-runtime"
    assert not_ready(ready, broken, connected=True) == "policy-broken"
    assert not_ready(replace(ready, inventory_age_s=61.0), strict, connected=True) == "inventory-stale"
    assert not_ready(replace(node, driver=None), policy, connected=True) == "driver-not-ready"


def domains(inventory: Inventory) -> list[object]:
    devices, _ = offered(inventory)
    by_name = {each.name: each.attributes.get("nvlinkDomain") for each in devices}
    return [by_name.get(device_name(gpu)) for gpu in inventory.gpus]


def test_gpus_that_reach_each_other_by_nvlink_have_one_domain() -> None:
    links = (Link(0, 1, "PIX", 4), Link(0, 2, "SYS"), Link(2, 3, "PIX", 2), Link(1, 4, "SYS", 2))
    gpus = [*make.gpus(4), make.mig_gpu(4), make.gpu(5)]
    one, other = make.uuid(0), make.uuid(2)
    assert domains(make.inventory(gpus, links=links)) == [one, one, other, other, None, None]


def test_a_fabric_of_several_machines_is_a_domain_of_its_own() -> None:
    joined = Fabric(FabricState.COMPLETED, 0, CLUSTER, 7)
    alone = replace(joined, cluster="00000000-0000-0000-0000-000000000000")
    states = [joined, replace(joined, state=FabricState.IN_PROGRESS), replace(joined, status=999), alone]
    gpus = [make.gpu(index, fabric=fabric) for index, fabric in enumerate(states)]
    links = tuple(Link(a, b, "SYS", 18) for a in range(4) for b in range(a + 1, 4))
    assert domains(make.inventory(gpus, links=links)) == [f"{CLUSTER}.7", *[make.uuid(0)] * 3]


def test_the_first_devices_are_linked_sets() -> None:
    """On a DGX-1 each GPU has double links to one neighbour and single ones to others."""
    inventory = load_topology(TOPOLOGIES / "dgx1-v100.toml")
    devices, _ = offered(inventory)
    minors = {str(gpu.uuid): gpu.index for gpu in inventory.gpus}
    order = [minors[str(each.attributes["uuid"])] for each in devices]
    links = {(link.a, link.b): link.nvlink for link in inventory.links}

    def inside(some: Sequence[int]) -> int:
        return sum(links[a, b] for a in some for b in some if a < b)

    assert sorted(order) == list(range(8))
    assert [inside(order[at : at + 2]) for at in (0, 2, 4, 6)] == [2, 2, 2, 2]
    assert inside(order[:4]) == inside(order[4:]) == max(inside(range(4)), inside(range(4, 8)))


def test_a_gpu_out_of_use_is_tainted_and_never_evicts_and_is_not_ill() -> None:
    stops = parse_policy({"health": {"containers": "stop"}}, "test")
    assert taints(make.gpu(0, cordon=Cordon()), policy=stops) == [
        Taint("gpu.nri.io/cordoned", "by-the-administrator", "NoSchedule")
    ]
    (device, *_), _ = offered([make.gpu(0, cordon=Cordon())])
    assert device.fault == ""
