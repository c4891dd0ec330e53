"""GPUs that NVIDIA's DRA driver prepared: held by the names of its devices, until nobody lists them."""

from __future__ import annotations

from typing import NoReturn

import pytest
from msgspec.structs import replace

from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import ContainerId, PodId
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.kubelet.allocations import held_by_others
from nri_gpu.ledger.apply import apply
from nri_gpu.ledger.events import (
    Created,
    DevicesAllocated,
    DevicesPrepared,
    Gone,
    LedgerEvent,
    PodGone,
    Reconciled,
    Renumbered,
    Rules,
    Synchronized,
    Ticked,
)
from nri_gpu.ledger.holders import UNUSED, DriverDevice
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.opened import Monitors, live
from nri_gpu.ledger.prepared import prepared_uuids
from nri_gpu.ledger.reservations import SETTLED_S
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.kubelet_settings import KubeletSettings
from tests.support.builders import container, gpu, held_node, inventory, mig, mig_gpu, mig_uuid, pod, uuid
from tests.support.ledgers import RULES, after

# Minors are not indices: GPU 0 has 7, GPU 1 has 6, and so on.
PLACED = inventory([mig_gpu(0, mig=tuple(mig(0, place, placement=place) for place in (0, 1))), gpu(1)])
UNPLACED = inventory([mig_gpu(0, ("1g.5gb", "1g.5gb+me", "2g.10gb")), gpu(1)])
WHOLE = {uuid(0), mig_uuid(0), mig_uuid(0, 1)}
NAMES = {
    "a GPU, by minor": ("gpu-6", {uuid(1)}),
    "a GPU that is in MIG mode by now": ("gpu-7", WHOLE),
    "a MIG device": ("gpu-7-mig-1g5gb-19-1", {mig_uuid(0, 1)}),
    "a MIG device that is not made yet": ("gpu-7-mig-1g5gb-19-5", WHOLE),
    "one of another profile there": ("gpu-7-mig-2g10gb-14-0", WHOLE),
    "one of a GPU that is not in MIG mode yet": ("gpu-6-mig-1g5gb-19-0", {uuid(1)}),
    "a part of another kind": ("gpu-6-part-3", {uuid(1)}),
    "a GPU that this node has not": ("gpu-3", set()),
    "a GPU of another kernel driver": ("gpu-vfio-6", set()),
    "no minor": ("gpu-six", set()),
    "a number that no minor has": ("gpu-" + "6" * 4000, set()),
    "more than a name has": ("gpu-6-" + "x" * 64, set()),
    "another digit": ("gpu-\u0666", set()),
    "nothing": ("", set()),
    "a second line": ("gpu-6\n", set()),
}


@pytest.mark.parametrize(("name", "uuids"), NAMES.values(), ids=NAMES.keys())
def test_a_device_is_the_gpu_whose_minor_it_names(name: str, uuids: set[GpuUuid]) -> None:
    assert prepared_uuids(name, PLACED) == uuids


def test_where_no_placement_is_known_it_may_be_each_of_its_profile() -> None:
    assert prepared_uuids("gpu-7-mig-1g5gb-19-1", UNPLACED) == {mig_uuid(0)}
    assert prepared_uuids("gpu-7-mig-1g5gb-me-20-1", UNPLACED) == {mig_uuid(0, 1)}
    assert prepared_uuids("gpu-7-mig-3g20gb-9-0", UNPLACED) == {*WHOLE, mig_uuid(0, 2)}


def of(device: str, name: str = "theirs", pod_id: str = "") -> DriverDevice:
    return DriverDevice(device=device, namespace="ml", pod_name=name, container_name="main", pod_id=PodId(pod_id))


def listed(at: float, *devices: DriverDevice) -> Reconciled:
    return Reconciled(at, (), frozenset(), devices)


def held(ledger: Ledger) -> set[GpuUuid]:
    """GPUs that another pod cannot have exclusively."""
    usage = ledger.usage()
    return {uuid(index) for index in range(4) if usage.get(uuid(index), UNUSED).blocks(Mode.EXCLUSIVE, pod().uid)}


def test_its_gpu_is_held_before_a_container_has_it_and_while_that_is_made_anew() -> None:
    ledger = after(Ledger(), DevicesPrepared(1.0, (of("gpu-6"),)))
    assert held(ledger) == {uuid(1)}
    opens = container(of=pod("theirs", namespace="ml"), devices=(held_node(gpu(1)),))
    created = after(ledger, Created(2.0, opens, live=live(opens)))
    assert held(created) == {uuid(1)}
    assert [each.device for each in created.external.values()] == [""]  # one holder, not two
    assert held(after(created, Gone(3.0, (opens.id,)))) == {uuid(1)}
    assert held(after(created, Synchronized(3.0))) == {uuid(1)}


def test_a_container_that_opens_another_gpu_is_no_reason_to_let_it_go() -> None:
    opens = container(of=pod("theirs", namespace="ml"), devices=(held_node(gpu(2)),))
    other = container(of=pod("theirs", namespace="ml"), name="side", devices=(held_node(gpu(1)),))
    events = [Created(2.0, each, live=live(each)) for each in (opens, other)]
    ledger = after(Ledger(), DevicesPrepared(1.0, (of("gpu-6"),)), *events)
    assert held(after(ledger, Gone(3.0, (other.id,)))) == {uuid(1), uuid(2)}


def test_pods_that_share_a_device_hold_it_until_the_last_of_them_is_gone() -> None:
    one, two = of("gpu-6", "one", pod_id="s-1"), of("gpu-6", "two", pod_id="s-2")
    ledger = after(Ledger(), DevicesPrepared(1.0, (one,)), DevicesPrepared(1.0, (two,)))
    assert len(ledger.usage()[uuid(1)].external) == 2
    ledger = after(ledger, PodGone(2.0, PodId("s-1")), listed(2.0 + SETTLED_S, two))
    assert len(ledger.usage()[uuid(1)].external) == 1
    assert held(ledger) == {uuid(1)}
    assert held(after(ledger, PodGone(8.0, PodId("s-2")), listed(8.0 + SETTLED_S))) == set()


ENDS: dict[str, tuple[tuple[LedgerEvent, ...], bool]] = {
    "a list that lacks it": ((listed(2.0),), True),
    "lists that lack it for a while": ((listed(2.0), listed(2.0 + SETTLED_S)), False),
    "a list that has it again": ((listed(2.0), listed(3.0, of("gpu-6")), listed(2.0 + SETTLED_S)), True),
    "its sandbox, which may be made anew": ((PodGone(2.0, PodId("s")),), True),
    "its sandbox, before the kubelet unprepares it": ((PodGone(2.0, PodId("s")), listed(3.0)), True),
    "its sandbox, and a list that lacks it later": ((PodGone(2.0, PodId("s")), listed(2.0 + SETTLED_S)), False),
    "its sandbox, made anew": (
        (PodGone(2.0, PodId("s")), DevicesPrepared(3.0, (of("gpu-6", pod_id="t"),)), listed(2.0 + SETTLED_S)),
        True,
    ),
    "another sandbox": ((PodGone(2.0, PodId("t")),), True),
    "a sandbox without an id": ((DevicesPrepared(1.0, (of("gpu-6", "more"),)), PodGone(2.0, PodId(""))), True),
}


@pytest.mark.parametrize(("events", "still"), ENDS.values(), ids=ENDS.keys())
def test_it_ends_when_it_is_not_listed_for_a_while(events: tuple[LedgerEvent, ...], still: bool) -> None:
    """A kubelet that has just started lists no pod, and one that makes a sandbox anew prepares nothing again."""
    ledger = after(Ledger(), DevicesPrepared(1.0, (of("gpu-6", pod_id="s"),)), *events)
    assert held(ledger) == ({uuid(1)} if still else set())


def test_it_is_read_by_the_node_as_it_is_now() -> None:
    """A MIG device that the driver makes for a claim, and GPUs that are not known yet."""
    rules = Rules(60.0, inventory([]))
    ledger = after(Ledger(), DevicesPrepared(1.0, (of("gpu-7-mig-1g5gb-19-1"),)), rules=rules)
    assert not ledger.usage()
    ledger = after(ledger, Renumbered(2.0), rules=replace(rules, inventory=inventory([gpu(0)])))
    assert ledger.usage().keys() == {uuid(0)}
    ledger = after(ledger, Renumbered(3.0), rules=replace(rules, inventory=PLACED))
    assert ledger.usage().keys() == {mig_uuid(0, 1)}


def test_a_monitor_holds_nothing_by_its_claim() -> None:
    """PodResources does not tell that a claim is for monitoring."""
    rules = replace(RULES, monitors=Monitors(Globs(("ml/*",))))
    ledger = after(Ledger(), DevicesPrepared(1.0, (of("gpu-6"),)), rules=rules)
    assert held(ledger) == set()
    assert [each.watched for each in ledger.external.values()] == [{uuid(1)}]


def test_a_pod_without_a_known_sandbox_is_not_every_such_pod() -> None:
    """The kubelet's own plugin has just allocated a replica, to a pod that nobody has named either."""
    replicas = frozenset(AllocatedDevice("nvidia.com/gpu", f"{uuid(1)}::{number}") for number in range(2))
    event = DevicesAllocated(1.0, (min(replicas, key=lambda each: each.id),), shared=True)
    ledger = after(Ledger(), DevicesPrepared(1.0, (of("gpu-6"),)), event)
    settings = KubeletSettings(enabled=True, replicas=2)
    assert held_by_others(ledger, settings, replicas, shared=True) == {uuid(1)}
    assert ledger.usage()[uuid(1)].load == 2


class NotRead(dict[ContainerId, DriverDevice]):
    def items(self) -> NoReturn:
        pytest.fail("read anew")


def test_an_event_that_changes_no_holder_does_not_read_what_is_prepared() -> None:
    """A claim that all pods of a node share is prepared for each, and every request is some events."""
    ledger = after(Ledger(), DevicesPrepared(1.0, tuple(of("gpu-6", f"pod-{number}") for number in range(3))))
    ledger = replace(ledger, prepared=NotRead(ledger.prepared))
    for event in (Ticked(2.0), Created(2.0, container(of="plain"))):
        assert apply(ledger, event, RULES) is ledger
