"""GPUs of other components that other pods have exclusively: who is reported, who is kept out, and who is neither."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.decision.overlaps import conflicts, granted_twice, overlaps
from nri_gpu.domain.allocation import AllocatedDevice
from nri_gpu.domain.container import Container, ContainerId, DeviceRef, PodId, PodUid
from nri_gpu.domain.decision import Code, Inject, Pass
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.resource_claim import PreparedClaim
from nri_gpu.ledger.events import Created
from nri_gpu.ledger.holders import UNNAMED_POD, ExternalAllocation, Reservation
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger
from nri_gpu.ledger.opened import live
from nri_gpu.policy.forms import Globs
from nri_gpu.policy.model import (
    Complete,
    Disarm,
    EnvironmentSettings,
    ForeignSettings,
    NamespaceRules,
    OnConflict,
    Otherwise,
    Policy,
)
from tests.support import builders as make
from tests.support.ledgers import after
from tests.unit.decision import deciding

REFUSE = Policy(foreign=ForeignSettings(conflict=OnConflict.REFUSE))
NODE = make.node()


def opening(*indices: int, of: str = "plugin", claim: str | None = None, **fields: Any) -> Container:  # noqa: ANN401 - any other field
    """A container that another component gave these GPUs."""
    held = tuple(make.held_node(make.gpu(index)) for index in indices)
    return make.container(claim, of=of, **{"devices": held, "name": "theirs", **fields})


def reserved(index: int, pod: str = "train", mode: Mode = Mode.EXCLUSIVE, uid: str = "") -> Reservation:
    """That GPU, allocated by the kubelet to a pod of which no container has it now."""
    return Reservation(
        device=AllocatedDevice("nvidia.com/gpu", make.uuid(index)),
        mode=mode,
        namespace="ml",
        pod_name=pod,
        since=0.0,
        until=None,
        pod_uid=PodUid(uid or f"uid-{pod}"),
        pod_id=PodId(f"sandbox-{pod}"),
    )


def held(*entries: Entry, reservations: Iterable[Reservation] = (), claims: Iterable[PreparedClaim] = ()) -> Ledger:
    ledger = make.ledger(*entries)
    for each in reservations:
        ledger = ledger.with_reservation(each)
    return replace(ledger, claims={each.uid: each for each in claims})


def beside(ledger: Ledger, container: Container) -> Ledger:
    """The ledger once that container was created."""
    return after(ledger, Created(0.0, container, None, live(container)))


ALONE = {
    "a grant": (held(make.entry(1)), "ml/train"),
    "a grant that has not started": (held(make.entry(1, phase=GrantPhase.CREATED)), "ml/train"),
    "a lost grant": (held(make.entry(1, phase=GrantPhase.LOST)), "ml/train"),
    "the kubelet's": (held(reservations=[reserved(1)]), "ml/train"),
    "a claim's": (held(claims=[make.prepared_claim(1)]), "claim ml/shared"),
    "a claim's and its pod's": (held(make.entry(1), claims=[make.prepared_claim(1)]), "ml/train"),
}
NOT_ALONE = {
    "nobody": held(),
    "another GPU": held(make.entry(2)),
    "a shared grant": held(make.entry(1, mode=Mode.SHARED)),
    "by MPS": held(make.entry(1, mode=Mode.MPS)),
    "for monitoring": held(make.entry(1, mode=None)),
    "a lapsed grant": held(make.entry(1, phase=GrantPhase.LAPSED)),
    "its own pod's grant": held(make.entry(1, to=make.container(of="plugin"))),
    "its own pod's allocation": held(reservations=[reserved(1, "plugin")]),
    "its own pod's claim": held(make.entry(1), claims=[make.prepared_claim(1, pods=("train", "plugin"))]),
    "a shared allocation": held(reservations=[reserved(1, mode=Mode.SHARED)]),
    "an allocation to nobody knows which pod": held(reservations=[reserved(1, uid=UNNAMED_POD)]),
    "a shared claim": held(claims=[make.prepared_claim(1, mode=Mode.SHARED)]),
    "a claim to monitor": held(claims=[make.prepared_claim(1, admin=True)]),
}


@pytest.mark.parametrize(("ledger", "holder"), ALONE.values(), ids=ALONE)
def test_what_another_pod_has_alone_is_reported_or_refused(ledger: Ledger, holder: str) -> None:
    container = opening(1)
    assert isinstance(decide(container, NODE, ledger, Policy()), Pass)
    (conflict,) = conflicts(beside(ledger, container)).values()
    assert (conflict.other.container_id, conflict.uuids) == (container.id, (make.uuid(1),))
    assert conflict.holders == (holder,)
    found = overlaps(beside(ledger, container))
    assert found.keys() == {make.uuid(1)}
    assert len(found[make.uuid(1)]) == 2
    assert granted_twice(beside(ledger, container)) == {}

    reason = deciding.reason_of(decide(container, NODE, ledger, REFUSE), Code.GPU_BUSY)
    for word in (holder, f"GPU 1 ({make.uuid(1)})", "foreign.conflict", "foreign.monitors", "docs/foreign.md"):
        assert word in reason.sentence
    assert "delete" not in reason.sentence


@pytest.mark.parametrize("ledger", NOT_ALONE.values(), ids=NOT_ALONE)
def test_nothing_is_said_of_what_no_other_pod_has_alone(ledger: Ledger) -> None:
    assert isinstance(decide(opening(1), NODE, ledger, REFUSE), Pass)
    found = beside(ledger, opening(1))
    assert found.external
    assert conflicts(found) == {}
    assert overlaps(found) == {}


def test_who_opens_every_gpu_is_one_conflict_and_one_refusal() -> None:
    ledger = held(*(make.entry(index, to=make.container(of=f"train-{index}")) for index in range(3)))
    container = opening(0, 1, 2, 3)
    (conflict,) = conflicts(beside(ledger, container)).values()
    assert conflict.uuids == tuple(map(make.uuid, range(3)))
    assert conflict.holders == ("ml/train-0", "ml/train-1", "ml/train-2")
    assert overlaps(beside(ledger, container)).keys() == {*conflict.uuids}
    sentence = deciding.refused(container, ledger=ledger, policy=REFUSE).sentence
    assert f"GPU 0 ({make.uuid(0)}) and 2 others, held exclusively by ml/train-0, ml/train-1, ml/train-2" in sentence


def test_a_refusal_of_long_names_keeps_its_end() -> None:
    long = [make.pod("p" * 252 + str(index), namespace="n" * 63) for index in range(4)]
    ledger = held(*(make.entry(index, to=make.container(of=pod)) for index, pod in enumerate(long)))
    reason = deciding.refused(opening(0, 1, 2, 3, of="q" * 253), ledger=ledger, policy=REFUSE)
    assert reason.fits
    assert str(reason).endswith("(docs/foreign.md).")


def test_a_pod_of_that_name_that_came_before_is_another_pod() -> None:
    """Its processes live on, and the StatefulSet has a new pod of that name."""
    old = make.container(of=make.pod("plugin", uid=PodUid("uid-before")))
    deciding.refused(opening(1), ledger=held(make.entry(1, to=old, phase=GrantPhase.LOST)), policy=REFUSE)


@pytest.mark.parametrize("exempt", [{"privileged": True}, {"of": "exporter-x2k9v"}], ids=["privileged", "a monitor"])
def test_monitors_and_privileged_containers_pass_as_ever(exempt: dict[str, Any]) -> None:
    policy = replace(REFUSE, foreign=replace(REFUSE.foreign, monitors=Globs(("ml/exporter-*",))))
    container = opening(0, 1, 2, 3, **exempt)
    assert isinstance(decide(container, NODE, held(make.entry(1)), policy), Pass)


def test_a_rule_of_its_cgroup_counts_as_a_node_does() -> None:
    number = (make.MAJORS.nvidia or 0, make.gpu(1).minor_number)
    container = make.container(of="plugin", opened=frozenset({number}))
    deciding.refused(container, ledger=held(make.entry(1)), policy=REFUSE)
    assert conflicts(beside(held(make.entry(1)), container))


def test_who_would_be_completed_disarmed_or_ignored_is_refused_too() -> None:
    """It would run, whatever we add to it; one that is refused anyway keeps its own sentence."""
    ledger = held(make.entry(1))
    completes = replace(REFUSE, foreign=replace(REFUSE.foreign, complete=Complete.ALL))
    for claim in (None, "1; capabilities=utility"):
        assert isinstance(decide(opening(1, claim=claim), NODE, held(), completes), Inject)
        deciding.refused(opening(1, claim=claim), ledger=ledger, policy=completes)
    disarms = replace(REFUSE, environment=EnvironmentSettings(disarm=Disarm.ALL))
    deciding.refused(opening(1, env={"NVIDIA_VISIBLE_DEVICES": "all"}), ledger=ledger, policy=disarms)
    ignores = replace(REFUSE, namespaces=NamespaceRules(deny=Globs(("ml",)), otherwise=Otherwise.IGNORE))
    assert isinstance(decide(opening(1, claim="1"), NODE, held(), ignores), Pass)
    deciding.reason_of(decide(opening(1, claim="1"), NODE, ledger, ignores), Code.GPU_BUSY)
    deciding.reason_of(decide(opening(1, claim="1"), NODE, ledger, REFUSE), Code.HELD_BY_OTHERS)


def test_a_mig_device_is_held_alone_by_its_capabilities() -> None:
    """The node of the whole GPU without a capability opens each of its MIG devices."""
    gpu = make.mig_gpu(1)
    node = make.node([make.gpu(0), gpu])
    ledger = held(make.entry_of(make.mig_uuid(1)))
    caps = [
        DeviceRef(f"/dev/nvidia-caps/nvidia-cap{part.compute_instance_minor}", 510, part.compute_instance_minor or 0)
        for part in gpu.mig
    ]
    mine, other = (make.container(of="plugin", devices=(make.held_node(gpu), cap)) for cap in caps)
    whole = make.container(of="plugin", devices=(make.held_node(gpu),))
    for container in (mine, whole):
        assert "MIG device 1:0" in deciding.refused(container, node, ledger, REFUSE).sentence
    assert isinstance(decide(other, node, ledger, REFUSE), Pass)


def test_a_number_that_moved_is_a_second_grant_and_no_conflict() -> None:
    """Both were granted GPUs here, so one of them must go."""
    moved = replace(make.foreign(1, of="moved"), container="main")
    ledger = make.ledger(make.entry(1), others=[moved])
    assert conflicts(ledger) == {}
    assert granted_twice(ledger).keys() == overlaps(ledger).keys() == {make.uuid(1)}


def test_two_grants_and_another_components_gpu() -> None:
    """Each is told for what it is, and the overlap names all three."""
    two = [make.entry(1), make.entry(1, to=make.container(of="second"))]
    ledger = make.ledger(*two, others=[make.foreign(1)])
    assert granted_twice(ledger) == {make.uuid(1): ("ml/second", "ml/train")}
    assert conflicts(ledger)[ContainerId("plugin.main")].holders == ("ml/second", "ml/train")
    assert len(overlaps(ledger)[make.uuid(1)]) == 3


def test_a_monitor_that_holds_what_the_kubelet_allocated_to_it() -> None:
    """It is in conflict about that GPU alone."""
    other: ExternalAllocation = replace(make.foreign(0, 1), watched=frozenset({make.uuid(0)}))
    (conflict,) = conflicts(make.ledger(make.entry(0, 1), others=[other])).values()
    assert conflict.uuids == (make.uuid(1),)


@pytest.mark.parametrize(("phase", "told"), [(GrantPhase.RUNNING, True), (GrantPhase.LOST, False)])
def test_of_one_that_is_being_looked_for_only_a_listed_one_is_told(phase: GrantPhase, *, told: bool) -> None:
    """Of another, an old file may be all that is left."""
    sought = make.entry(1, to=make.container(of="second"), phase=phase)
    ledger = replace(make.ledger(make.entry(1), sought), unsought={sought.grant.container_id: 0.0})
    assert bool(granted_twice(ledger)) is told
