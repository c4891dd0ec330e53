"""Which resources and devices a node advertises, and which of them it prefers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest
from msgspec.structs import replace

from nri_gpu.decision.refusals import CORDONED
from nri_gpu.decision.topology import topology_of
from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.cordons import NO_CORDONS, Cordons
from nri_gpu.domain.gpu import Gpu, GpuUuid
from nri_gpu.domain.node import GpuFault
from nri_gpu.kubelet.advertised import STUCK, TAKEN, AllocationError
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.reservations import reservation_id
from nri_gpu.policy.kubelet_settings import KubeletSettings, MigStrategy
from nri_gpu.policy.model import Policy
from nri_gpu.policy.read import parse_policy
from nri_gpu.policy.rules import PoolList
from tests.support import builders
from tests.support.builders import entry, foreign, gpu, ledger, mig_gpu, mig_uuid, uuid
from tests.support.fabrics import KNOWN
from tests.support.golden_sets import GOLDEN, Golden
from tests.support.kubelet_nodes import GPU, ExternalNode, PluginNode, again, from_kubelet

NONE, SINGLE, MIXED = MigStrategy.NONE, MigStrategy.SINGLE, MigStrategy.MIXED
SMALL, MEDIA, LARGE = (f"nvidia.com/mig-{profile}" for profile in ("1g.5gb", "1g.5gb.me", "3g.20gb"))
Table = dict[str, list[tuple[str, bool]]]


def up(*ids: str) -> list[tuple[str, bool]]:
    return [(id_, True) for id_ in ids]


def down(*ids: str) -> list[tuple[str, bool]]:
    return [(id_, False) for id_ in ids]


WHOLE: Final = (gpu(0), gpu(1))
ALIKE: Final = (mig_gpu(0), mig_gpu(1))
UNLIKE: Final = (mig_gpu(0, ["1g.5gb", "3g.20gb"]), mig_gpu(1))
ONE_EMPTY: Final = (mig_gpu(0), mig_gpu(1, []))
ALL_EMPTY: Final = (mig_gpu(0, []), mig_gpu(1, []))
PART: Final = (mig_gpu(0, ["1g.5gb+me", "1g.5gb"]), gpu(1))
SLICES: Final = (mig_gpu(0, ["1c.3g.20gb", "3g.20gb"]), gpu(1))
# What differs from their table is in docs/kubernetes.md, "Differences from NVIDIA's device plugin".
TABLE: Final[dict[str, tuple[MigStrategy, Sequence[Gpu], Table]]] = {
    "none, no MIG": (NONE, WHOLE, {GPU: up(uuid(0), uuid(1))}),
    # Theirs offers a GPU in MIG mode whole, and no program finds a device on it.
    "none, all MIG": (NONE, ALIKE, {GPU: down(uuid(0), uuid(1))}),
    "none, part MIG": (NONE, PART, {GPU: down(uuid(0)) + up(uuid(1))}),
    "none, empty MIG": (NONE, ONE_EMPTY, {GPU: down(uuid(0), uuid(1))}),
    "single, no MIG": (SINGLE, WHOLE, {GPU: up(uuid(0), uuid(1))}),
    "single, all alike": (SINGLE, ALIKE, {GPU: up(mig_uuid(0, 0), mig_uuid(0, 1), mig_uuid(1, 0), mig_uuid(1, 1))}),
    # Theirs ends with an error in these four; ours offers none of them and goes on.
    "single, two profiles": (SINGLE, UNLIKE, {GPU: []}),
    "single, an empty one": (SINGLE, ONE_EMPTY, {GPU: []}),
    "single, part MIG": (SINGLE, PART, {GPU: []}),
    "single, all empty": (SINGLE, ALL_EMPTY, {GPU: []}),
    "mixed, no MIG": (MIXED, WHOLE, {GPU: up(uuid(0), uuid(1))}),
    "mixed, all alike": (
        MIXED,
        ALIKE,
        {GPU: [], SMALL: up(mig_uuid(0, 0), mig_uuid(0, 1), mig_uuid(1, 0), mig_uuid(1, 1))},
    ),
    "mixed, two profiles": (
        MIXED,
        UNLIKE,
        {GPU: [], SMALL: up(mig_uuid(0, 0), mig_uuid(1, 0), mig_uuid(1, 1)), LARGE: up(mig_uuid(0, 1))},
    ),
    "mixed, part MIG": (MIXED, PART, {GPU: up(uuid(1)), MEDIA: up(mig_uuid(0, 0)), SMALL: up(mig_uuid(0, 1))}),
    "mixed, an empty one": (MIXED, ONE_EMPTY, {GPU: [], SMALL: up(mig_uuid(0, 0), mig_uuid(0, 1))}),
    "mixed, all empty": (MIXED, ALL_EMPTY, {GPU: []}),
    "mixed, a compute instance within": (MIXED, SLICES, {GPU: up(uuid(1)), LARGE: up(mig_uuid(0, 1))}),
}


@pytest.mark.parametrize(("strategy", "gpus", "expected"), TABLE.values(), ids=TABLE)
def test_what_each_strategy_offers(strategy: MigStrategy, gpus: Sequence[Gpu], expected: Table) -> None:
    assert offered(KubeletSettings(mig_strategy=strategy), gpus) == expected


def offered(settings: KubeletSettings, gpus: Sequence[Gpu]) -> Table:
    node = PluginNode(settings=settings)
    node.put_gpus(gpus)
    return {
        name: [(device.id, not device.why) for device in node.devices.devices(name)]
        for name in node.devices.resources()
    }


def test_replicas_of_mig_devices_by_another_name() -> None:
    settings = KubeletSettings(mig_strategy=MIXED, replicas=2, rename=True)
    assert offered(settings, (mig_gpu(0, ["1g.5gb+me"]), gpu(1))) == {
        "nvidia.com/gpu.shared": up(f"{uuid(1)}::0", f"{uuid(1)}::1"),
        "nvidia.com/mig-1g.5gb.me.shared": up(f"{mig_uuid(0)}::0", f"{mig_uuid(0)}::1"),
    }
    assert offered(KubeletSettings(mig_strategy=SINGLE, replicas=2), (mig_gpu(0, ["1g.5gb"]),)) == {
        GPU: up(f"{mig_uuid(0)}::0", f"{mig_uuid(0)}::1")
    }


def test_one_gpu_lost_takes_all_its_replicas() -> None:
    assert offered(KubeletSettings(replicas=2), (gpu(0, unavailable="lost"), gpu(1))) == {
        GPU: down(f"{uuid(0)}::0", f"{uuid(0)}::1") + up(f"{uuid(1)}::0", f"{uuid(1)}::1")
    }


def test_without_the_runtime_or_the_driver_nothing_is_healthy() -> None:
    node = PluginNode()
    node.devices.connected = False
    assert all("not connected to the container runtime" in device.why for device in node.devices.devices(GPU))
    node.devices.connected = True
    assert not any(device.why for device in node.devices.devices(GPU))
    node.node_state.put_driver(None, "the driver is being replaced")
    assert all(device.why for device in node.devices.devices(GPU))


def test_names_keep_to_what_a_resource_may_be_called() -> None:
    """NVIDIA's plugin refuses longer ones than 63."""
    settings = KubeletSettings(resource=f"{'x' * 33}.io/gpu", mig_strategy=MIXED, replicas=2, rename=True)
    names = offered(settings, (mig_gpu(0, ["7g.80gb+me"]),))
    assert max(map(len, names)) == 58


def test_another_prefix_is_that_of_profiles_too() -> None:
    settings = KubeletSettings(resource="example.com/accelerator", mig_strategy=MIXED)
    assert list(offered(settings, PART)) == [
        "example.com/accelerator",
        "example.com/mig-1g.5gb.me",
        "example.com/mig-1g.5gb",
    ]


L40S: Final = "nvidia.com/l40s"
OF_POOL: Final[dict[str, Any]] = {"pool": [{"name": "kind", "device": ["1", "2"]}]}
KINDS: Final = parse_policy(OF_POOL | {"kubelet": {"enabled": True, "resources": {L40S: "kind"}}}, "p.toml")


def test_each_pool_is_allocated_by_its_own_resource() -> None:
    node = PluginNode(KINDS)
    assert {name: [device.id for device in node.devices.devices(name)] for name in node.devices.resources()} == {
        GPU: [uuid(0), uuid(3)],
        L40S: [uuid(1), uuid(2)],
    }
    assert node.create(from_kubelet(node.allocate(uuid(1), resource=L40S))) == (uuid(1),)
    with pytest.raises(AllocationError, match="no longer has"):
        node.allocate(uuid(2), resource=GPU)
    assert node.devices.preferred(L40S, [uuid(2), uuid(1)], [], 1) == (uuid(1),)


def test_a_pod_keeps_what_it_was_allocated_under_another_of_our_names() -> None:
    """Its container starts again, and by the new name the GPU is offered to nobody until it is gone."""
    for first, name, then, other in ((Policy.default(), GPU, KINDS, L40S), (KINDS, L40S, Policy.default(), GPU)):
        node = PluginNode(first, replace(first.kubelet, enabled=True))
        holder = from_kubelet(node.allocate(uuid(1), resource=name))
        assert node.create(holder) == (uuid(1),)
        node.policy, node.settings = then, replace(then.kubelet, enabled=True)
        node.restarted({holder.id: (holder, True)})
        assert {device.id: device.why for device in node.devices.devices(other)}[uuid(1)] == TAKEN
        node.stop(holder)
        assert node.create(again(holder)) == (uuid(1),)
        assert {device.id: device.why for device in node.devices.devices(other)}[uuid(1)] == TAKEN
        node.end_pod(holder)
        node.plugin.lapse()
        assert not any(device.why for device in node.devices.devices(other))


@pytest.mark.parametrize(("name", "kept"), [(GPU, True), ("nvidia.com/gone", False)])
def test_what_another_of_our_names_reserves_is_kept_and_what_none_reserves_ends(name: str, kept: bool) -> None:
    """As PodResources lists it after a restart, for a pod of which no container is there now."""
    node = ExternalNode(KINDS.kubelet)
    node.policy = KINDS
    node.restart_daemon()
    waits = builders.container(of="waits")
    node.lists(waits, [uuid(1)], name)
    node.sandbox_created(waits)
    node.list_all()
    why = {device.id: device.why for device in node.devices.devices(L40S)}
    assert why == {uuid(1): TAKEN if kept else "", uuid(2): ""}


def test_a_resource_whose_pool_goes_is_offered_empty() -> None:
    node = PluginNode(KINDS)
    assert len(node.devices.devices(L40S)) == 2
    node.node_state.use(replace(KINDS, pool=PoolList()))
    assert node.devices.devices(L40S) == ()
    assert len(node.devices.devices(GPU)) == 4
    assert L40S in node.devices.resources()


def test_a_profile_that_is_cut_away_keeps_its_resource_without_devices() -> None:
    """The kubelet forgets only what it is told; and a driver that stammers has not removed anything."""
    node = PluginNode(settings=KubeletSettings(mig_strategy=MIXED))
    node.put_gpus([mig_gpu(0), gpu(1)])
    assert [len(node.devices.devices(name)) for name in node.devices.resources()] == [1, 2]
    node.put_gpus([gpu(1)], faults=(GpuFault(0, "GPU is lost"),))
    assert [bool(device.why) for device in node.devices.devices(SMALL)] == [True, True]
    node.put_gpus([gpu(0), gpu(1)], faults=())
    assert [len(node.devices.devices(name)) for name in node.devices.resources()] == [2, 0]
    node.put_gpus([mig_gpu(0), gpu(1)], faults=())
    node.devices.devices(SMALL)
    node.put_gpus([gpu(0)], faults=(GpuFault(1, "GPU is lost"),))
    assert node.devices.devices(SMALL) == ()  # that the other GPU is lost says nothing of it
    assert [(each.id, bool(each.why)) for each in node.devices.devices(GPU)] == [(uuid(0), False), (uuid(1), True)]


def test_a_device_of_ours_is_unhealthy_while_another_component_gave_it_to_another_pod() -> None:
    """So that no pod more is sent to it; the pod that has it goes on."""
    node = PluginNode()
    node.put_gpus([gpu(0), gpu(1)])
    ours = replace(entry(0), allocation=Allocated((AllocatedDevice(GPU, uuid(0)),)))
    for others, why in (([], ""), ([foreign(0)], STUCK)):
        node.node_state.commit(ledger(ours, others=others))
        assert [each.why for each in node.devices.devices(GPU)] == [why, ""]


def _held(used: tuple[GpuUuid, ...]) -> Ledger:
    other = replace(foreign(), uuids=frozenset(used))
    return ledger(others=[other] if used else [])


BETTER: Final = "ours is the better set now; theirs keeps two good pairs for later requests of the same size"
ORDER: Final = "as good; theirs depends on the order of the list, which the kubelet's is random, ours takes the lowest"
IMPOSSIBLE: Final = "theirs is empty: more is required than was asked for, or than is free; ours is what is required"
# What go-gpuallocator answers otherwise: topology, available, required, size -> ours, why (docs/kubernetes.md).
EIGHT: Final = tuple(range(8))
DEVIATIONS: Final = {
    ("dgx1-v100", EIGHT, (), 2): ((2, 3), BETTER),
    ("dgx1-v100", (0, 2, 4, 5), (), 2): ((0, 4), BETTER),
    ("dgx1-v100", EIGHT[::-1], (), 1): ((0,), ORDER),
    ("dgx1-v100", EIGHT[::-1], (), 2): ((2, 3), ORDER),
    ("a100", (5, 2, 0, 1, 6, 7, 4), (1,), 4): ((0, 1, 4, 5), ORDER),
    ("h100, PCIe", (7, 5, 1, 2), (), 2): ((1, 2), ORDER),
    ("h100, PCIe", (3, 2, 0, 6, 5, 7, 1, 4), (2,), 3): ((0, 1, 2), ORDER),
    ("h100", (7, 1, 0, 6, 5), (5, 7), 4): ((0, 5, 6, 7), ORDER),
    ("h100", (2, 0, 3, 4, 6, 7, 1, 5), (3,), 2): ((0, 3), ORDER),
    ("8 x PCIe", (2, 6, 5, 0, 7, 1, 3, 4), (), 2): ((0, 1), ORDER),
    ("dgx1-v100", EIGHT[1:], (0, 1, 2, 3), 4): ((0, 1, 2, 3), IMPOSSIBLE),
    ("dgx1-v100", EIGHT, (1, 2, 3, 4, 5, 6), 4): ((1, 2, 3, 4, 5, 6), IMPOSSIBLE),
    ("dgx1-v100", EIGHT[1:6], (1, 2, 3, 4, 5, 6), 1): ((1, 2, 3, 4, 5, 6), IMPOSSIBLE),
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_as_nvidias_plugin_prefers_or_for_a_reason(case: Golden) -> None:
    """go-gpuallocator's own answers, through the kubelet's question; other pods of its hold what is not available."""
    node, inventory = PluginNode(), KNOWN[case.topology]
    node.node_state.put_inventory(inventory)
    ids = [each.uuid for each in inventory.gpus]
    node.plugin.state.ledger = _held(tuple(set(ids) - {ids[each] for each in {*case.available, *case.required}}))
    required = tuple(sorted(case.required))
    said = node.devices.preferred(
        GPU, [ids[each] for each in case.available], [ids[each] for each in required], case.size
    )
    chosen = tuple(sorted(ids.index(GpuUuid(each)) for each in said))
    expected, why = DEVIATIONS.get((case.topology, case.available, required, case.size), (case.chosen, ""))
    assert chosen == expected
    ours = topology_of(inventory).score(chosen)
    assert {BETTER: ours > case.points, ORDER: ours == case.points, IMPOSSIBLE: not case.chosen, "": True}[why]


# GPUs, replicas of each, in use, required, size -> how many of each GPU. The first four are NVIDIA's own examples
# of its policy `distributed`; the others are its rule: least allocated first, then fewest picked in this request.
REPLICAS: Final = {
    "one each": (2, 4, [], [], 2, [1, 1]),
    "one each of three": (3, 2, [], [], 3, [1, 1, 1]),
    "more than GPUs": (2, 4, [], [], 3, [2, 1]),
    "one GPU": (1, 4, [], [], 4, [4]),
    "the second is ahead by one": (2, 4, [(1, 0)], [], 2, [1, 1]),
    "the first is ahead by one": (2, 4, [(0, 3)], [], 2, [1, 1]),
    "ahead by two": (2, 4, [(0, 0), (0, 1)], [], 2, [0, 2]),
    "ahead by two, of three": (2, 4, [(0, 0), (0, 1)], [], 3, [1, 2]),
    "two of three GPUs are ahead": (3, 4, [(0, 0), (1, 0)], [], 3, [1, 1, 1]),
    "a full one": (2, 2, [(0, 0), (0, 1)], [], 2, [0, 2]),
    "a required one counts as allocated": (2, 4, [], [(0, 2)], 2, [1, 1]),
    "a required one beside one in use": (2, 4, [(1, 0)], [(1, 1)], 3, [2, 1]),
    "nothing but required ones": (2, 4, [], [(0, 0), (0, 1)], 2, [2, 0]),
    "more required than asked for": (2, 4, [], [(0, 0), (0, 1)], 1, [2, 0]),
    "too few": (2, 2, [(0, 0), (0, 1), (1, 0)], [], 2, [0, 1]),
}


@pytest.mark.parametrize(("gpus", "replicas", "used", "must", "size", "each"), REPLICAS.values(), ids=REPLICAS)
def test_replicas_are_spread(
    gpus: int, replicas: int, used: list[tuple[int, int]], must: list[tuple[int, int]], size: int, each: list[int]
) -> None:
    node = PluginNode(settings=KubeletSettings(replicas=replicas))
    node.put_gpus([gpu(index) for index in range(gpus)])
    in_use, required = _ids(used), _ids(must)
    available = [device.id for device in node.devices.devices(GPU) if device.id not in in_use]
    chosen = node.devices.preferred(GPU, available[::-1], required, size)
    assert [sum(id_.startswith(uuid(index)) for id_ in chosen) for index in range(gpus)] == each
    assert set(required) <= set(chosen) <= set(available)
    assert len(chosen) == len(set(chosen))


def _ids(replicas: list[tuple[int, int]]) -> list[str]:
    return [f"{uuid(index)}::{number}" for index, number in replicas]


def test_mig_devices_leave_other_gpus_whole() -> None:
    """NVIDIA's plugin spreads them; a GPU that no container uses can be cut anew."""
    small = "nvidia.com/mig-1g.5gb"
    node = PluginNode(settings=KubeletSettings(mig_strategy=MigStrategy.MIXED))
    node.put_gpus([mig_gpu(0), mig_gpu(1, ["1g.5gb"] * 3)])
    available = [mig_uuid(0, 0), mig_uuid(0, 1), mig_uuid(1, 1), mig_uuid(1, 2)]  # one of GPU 1 is in use
    assert node.devices.preferred(small, available, (), 2) == (mig_uuid(1, 1), mig_uuid(1, 2))


def out_of_use(node: PluginNode, *given: str) -> None:
    """Root takes the first GPU out of use. given: the devices that pods have of it."""
    ids = frozenset(reservation_id(AllocatedDevice(GPU, each)) for each in given)
    node.node_state.put_cordons(Cordons(frozenset({uuid(0)}), {uuid(0): ids}))


def test_what_is_out_of_use_is_unhealthy_but_for_the_pods_that_have_it() -> None:
    """And it is allocated to nobody, which the kubelet may try once a pod is gone that we do not know to be gone."""
    node = PluginNode(settings=replace(KubeletSettings(), replicas=2, rename=False))
    node.put_gpus([gpu(0), gpu(1)])
    first, second = f"{uuid(0)}::0", f"{uuid(0)}::1"

    def why() -> list[str]:
        return [each.why for each in node.devices.devices(GPU)]

    out_of_use(node, first)
    assert why() == ["", CORDONED, "", ""]
    assert node.devices.preferred(GPU, [first, f"{uuid(1)}::0"], [], 1) == (f"{uuid(1)}::0",)
    for each in (second, first):
        with pytest.raises(AllocationError, match=CORDONED):
            node.allocate(each)
    assert why() == [CORDONED, CORDONED, "", ""], "the pod that had it is gone for the kubelet"
    node.node_state.put_cordons(NO_CORDONS)
    assert why() == ["", "", "", ""]
    out_of_use(node, first)
    assert why() == ["", CORDONED, "", ""]
    node.put_gpus([gpu(0, unavailable="GPU is lost"), gpu(1)])
    assert why() == ["GPU is lost", "GPU is lost", "", ""]
