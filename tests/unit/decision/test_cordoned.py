"""A GPU out of use: what had it before keeps it by each of the ways to a GPU, and nothing new gets it by any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.cdi.generate import NotReadyError, SpecificationOptions, specification_text
from nri_gpu.decision.claim_devices import prepared
from nri_gpu.decision.cordoned import given_after, given_now, in_use_for
from nri_gpu.decision.decide import decide
from nri_gpu.decision.refusals import CORDONED, CORDONS_UNKNOWN, why_not
from nri_gpu.domain.allocation import Allocated, AllocatedDevice
from nri_gpu.domain.container import Container, PodId
from nri_gpu.domain.cordons import NO_CORDONS, Cordons, marked
from nri_gpu.domain.decision import Code, Inject, Refuse
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.node import Loader, Node
from nri_gpu.domain.resource_claim import PreparedClaim
from nri_gpu.ledger.events import Created, Gone, PodGone
from nri_gpu.ledger.holders import UNNAMED_POD, Releasing, Reservation
from nri_gpu.ledger.ledger import Ledger, Live
from nri_gpu.ledger.reservations import reservation_id
from nri_gpu.policy.model import Complete, ForeignSettings, Policy
from nri_gpu.request.environment import VARIABLE
from tests.support.builders import (
    container,
    entry,
    foreign,
    gpu,
    held_node,
    inventory,
    ledger,
    mig_gpu,
    mig_uuid,
    node,
    pod,
    prepared_claim,
    uuid,
)
from tests.support.claim_nodes import allocated
from tests.support.ledgers import after
from tests.support.ledgers import prepared as with_claim

DEVICE: Final = AllocatedDevice("nvidia.com/gpu", uuid(0))
ALL: Final = Policy(foreign=ForeignSettings(complete=Complete.ALL))


def out_of_use(*indices: int, of: Ledger | None = None, on: Node | None = None) -> Node:
    """A node with these GPUs out of use, since that ledger."""
    of, on = of or Ledger(), on or node()
    gpus = [each for each in on.gpus if each.index in indices]
    units = [unit for each in gpus for unit in (each.uuid, *(part.uuid for part in each.mig))]
    cordons = Cordons(frozenset(each.uuid for each in gpus), {unit: given_now(of, unit) for unit in units})
    return replace(on, inventory=marked(on.inventory, cordons))


def of_kubelet(of: str = "train", **fields: object) -> Container:
    return container(of=of, kubelet=Allocated(devices=(DEVICE,), **fields))  # type: ignore[arg-type]


def granted(of: Container, before: Ledger, on: Node, policy: Policy) -> str:
    decision = decide(of, on, before, policy)
    assert isinstance(decision, Inject | Refuse)
    return str(decision.reason) if isinstance(decision, Refuse) else ""


def by_annotation(before: Ledger, on: Node) -> str:
    return granted(container("device=0", name="next"), before, on, Policy())


def by_kubelet(before: Ledger, on: Node) -> str:
    """The kubelet's own answer of before is on the container; of after, there is none (tests/unit/kubelet)."""
    return granted(of_kubelet(), before, on, Policy())


def by_claim(before: Ledger, on: Node) -> str:
    found = prepared(allocated(0), on, before, Policy())
    return "" if isinstance(found, PreparedClaim) else str(found.reason)


def by_completion(before: Ledger, on: Node) -> str:
    return granted(container(devices=(held_node(gpu(0)),)), before, on, ALL)


def by_other_plugin(before: Ledger, on: Node) -> str:
    """Another device plugin's, for which we inject, goes on allocating what is out of use."""
    return granted(of_kubelet(key=VARIABLE), before, on, Policy())


def opened() -> Ledger:
    """The pod's container has GPU 0 by another component."""
    of = container(of="train")
    has = Live(of.id, of.name, of.pod.id, of.pod.full_name, pod_uid=of.pod.uid)
    external = replace(foreign(0, of="train"), container_id=of.id)
    return replace(ledger(others=[external]), live={of.id: has})


def of_claim() -> Ledger:
    found = prepared(allocated(0), node(), Ledger(), Policy())
    assert isinstance(found, PreparedClaim)
    return with_claim(Ledger(), found)


WAYS: Final[dict[str, tuple[Callable[[Ledger, Node], str], Ledger]]] = {
    "annotation": (by_annotation, ledger(entry(0))),
    "claim": (by_claim, of_claim()),
    "foreign completion": (by_completion, opened()),
    "another device plugin": (by_other_plugin, ledger(entry(0))),
}


@pytest.mark.parametrize(("ask", "before"), WAYS.values(), ids=WAYS)
def test_what_had_it_before_is_served_and_what_is_new_is_not(
    ask: Callable[[Ledger, Node], str], before: Ledger
) -> None:
    """Also after a boot, when the ledger is empty: what had it is kept with the GPU."""
    assert ask(Ledger(), node()) == ""
    cordoned = out_of_use(0, of=before)
    assert ask(before, cordoned) == ""
    assert ask(Ledger(), cordoned) == ""
    assert CORDONED in ask(Ledger(), out_of_use(0))
    assert "repair it" not in ask(Ledger(), out_of_use(0))


def test_what_the_kubelet_allocated_is_from_before() -> None:
    """It allocates none that is out of use, so a container with its answer is served, whoever knows of its pod."""
    assert by_kubelet(Ledger(), out_of_use(0)) == ""
    assert granted(of_kubelet(key="claim ml/shared"), Ledger(), out_of_use(0), Policy()) == ""


def test_a_cdi_file_has_it_no_more(tmp_path: Path) -> None:
    options = SpecificationOptions(
        driver_root=Path("/"),
        library_dirs=(),
        stage_dir=tmp_path,
        loader=Loader.TREE,
        topology="a file",
        capabilities=DEFAULT_CAPABILITIES,
    )
    found = inventory([gpu(0), gpu(1)], simulated=True, driver_version="580.95.05")
    assert uuid(0) in specification_text(found, options)
    out = marked(found, Cordons(frozenset({uuid(0)})))
    assert uuid(0) not in specification_text(out, options)
    with pytest.raises(NotReadyError, match=CORDONS_UNKNOWN):
        specification_text(marked(found, Cordons(unknown=True)), options)


def test_any_gpu_is_another_gpu() -> None:
    cordoned = out_of_use(0, 1)
    for claim, got in (("1", {2}), ("2", {2, 3}), ("all", {2, 3})):
        decision = decide(container(claim), cordoned, Ledger(), Policy())
        assert isinstance(decision, Inject)
        assert set(decision.grant.uuids) == {uuid(each) for each in got}
    decision = decide(container("3"), cordoned, Ledger(), Policy())
    assert isinstance(decision, Refuse)
    assert decision.reason.code is Code.NO_SUCH_GPU
    assert CORDONED in str(decision.reason)


def test_a_pods_later_containers_have_what_its_first_had_and_nothing_more() -> None:
    before = ledger(entry(0))
    cordoned = out_of_use(0, 1, of=before)
    assert granted(container("device=0", name="side"), before, cordoned, Policy()) == ""
    assert CORDONED in granted(container("device=1", name="side"), before, cordoned, Policy())
    assert CORDONED in granted(container("device=0;mode=shared", of="other"), before, cordoned, Policy())


def test_the_same_request_has_the_same_answer() -> None:
    of = container("device=0")
    first = decide(of, node(), Ledger(), Policy())
    assert isinstance(first, Inject)
    held = after(Ledger(), Created(0.0, of, first.grant))
    assert decide(of, out_of_use(0, of=held), held, Policy()) == first


def test_admin_access_sees_it() -> None:
    found = prepared(allocated(0, admin=True), out_of_use(0), Ledger(), Policy())
    assert isinstance(found, PreparedClaim)
    watching = of_kubelet(key="claim ml/shared", admin=True)
    assert granted(watching, Ledger(), out_of_use(0), Policy()) == ""
    assert why_not(gpu(0, unavailable="lost", cordon=out_of_use(0).gpus[0].cordon), admin=True) == "lost"


def test_mig_devices_are_out_of_use_with_their_gpu_each_for_itself() -> None:
    cut = node([mig_gpu(0), gpu(1)])
    before = after(Ledger(), Created(0.0, container("mig=1g.5gb"), replace(entry(0).grant, uuids=(mig_uuid(0, 0),))))
    cordoned = out_of_use(0, of=before, on=cut)
    assert [why_not(part) for part in cordoned.gpus[0].parts] == [CORDONED, CORDONED]
    ours = in_use_for(container(), cordoned.inventory)
    assert [why_not(part) for part in ours.gpus[0].parts] == ["", CORDONED]
    assert marked(cordoned.inventory, NO_CORDONS) == cut.inventory


def test_where_nobody_can_tell_none_is_granted_anew() -> None:
    cordoned = replace(
        node(), inventory=marked(inventory(), Cordons(given={uuid(0): frozenset({"uid-train"})}, unknown=True))
    )
    assert CORDONS_UNKNOWN in granted(container("1", of="other"), Ledger(), cordoned, Policy())
    assert granted(container("1"), Ledger(), cordoned, Policy()) == ""


def test_a_gpu_in_use_is_marked_nowhere() -> None:
    assert marked(inventory(), NO_CORDONS) is not None
    whole = inventory()
    assert marked(whole, NO_CORDONS) is whole
    assert in_use_for(container(), whole) is whole
    one = marked(whole, Cordons(frozenset({uuid(0)})))
    assert in_use_for(container(), one) == one
    assert [bool(each.cordon) for each in one.gpus] == [True, False, False, False]


RESERVED: Final = Reservation(
    device=DEVICE, mode=Mode.EXCLUSIVE, namespace="ml", pod_name="train", since=0.0, until=None,
    pod_uid=pod().uid, pod_id=pod().id,
)  # fmt: skip


def running() -> Ledger:
    of = of_kubelet()
    return after(Ledger(), Created(0.0, of, replace(entry(0).grant, mode=Mode.EXCLUSIVE)))


def test_a_device_of_the_kubelet_is_kept_until_its_pod_is_gone() -> None:
    """Over each restart of its container, and not beyond the sandbox."""
    runs, id_ = running(), reservation_id(DEVICE)
    before = given_now(runs, uuid(0))
    assert before == {id_, pod().uid}
    crashed = after(runs, Gone(1.0, (container().id,)))
    assert id_ in given_after(before, crashed, uuid(0))
    gone = after(crashed, PodGone(2.0, pod().id))
    left = given_after(before, gone, uuid(0))
    assert id_ not in left
    assert pod().uid in left, "its sandbox may be made anew, with what the kubelet answered it"
    assert id_ in given_after(left, runs, uuid(0)), "which its container shows"
    listed = Ledger(reservations={DEVICE: replace(RESERVED, pod_id=PodId(""))})
    assert id_ not in given_after(left, listed, uuid(0)), "a kubelet before 1.34 lists pods that are over"
    assert id_ in given_after(before, listed, uuid(0))
    assert id_ in given_after(before, Ledger(), uuid(0), recalled=frozenset({id_}))


def test_who_has_just_released_it_may_come_again_and_no_pod_is_nobody() -> None:
    left = Ledger(releasing={uuid(0): Releasing(pod().uid, "ml/train", 0.0, 15.0)})
    assert given_now(left, uuid(0)) == {pod().uid}
    unnamed = Ledger(reservations={DEVICE: replace(RESERVED, pod_uid=UNNAMED_POD, pod_id=PodId(""))})
    assert given_now(unnamed, uuid(0)) == {reservation_id(DEVICE)}
    assert given_now(with_claim(Ledger(), prepared_claim(0)), uuid(0)) == {"claim-shared"}
