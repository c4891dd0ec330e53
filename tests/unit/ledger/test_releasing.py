"""From one pod's exclusive use to the next: who waits, for what, for how long, and what they are told."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu.decision.placement import Asker, place
from nri_gpu.domain.container import Container, ContainerId, FirstProcess
from nri_gpu.domain.decision import REFUSAL_MAX, Code, Reason
from nri_gpu.domain.gpu import Unit
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.events import Created, Gone, Looked, ProcessesFound, Rules, Started, Stopped
from nri_gpu.ledger.holders import Releasing
from nri_gpu.ledger.ledger import Entry, GrantPhase, Lapse, Ledger
from nri_gpu.request.annotation import parse_claim
from tests.support import builders as make
from tests.support.ledgers import RULES, after

A, B, A_SIDE = make.container(of="a"), make.container(of="b"), make.container(of="a", name="side")
NOW, GRACE_S = 100.0, 60.0
ON_0: Final = make.uuid(0)
RELEASING: Final = Releasing(A.pod.uid, "ml/a", NOW, GRACE_S)


def left(entry: Entry, rules: Rules = RULES) -> Ledger:
    """The ledger after that one entry's container is gone."""
    return after(make.ledger(entry), Stopped(NOW, entry.grant.container_id), rules=rules)


def asked(text: str, of: Container, ledger: Ledger) -> tuple[Unit, ...] | Reason:
    claim = parse_claim(make.KEY, text)
    return place(claim, Asker(of.pod.uid, claim.mode or Mode.EXCLUSIVE), make.inventory(), ledger.usage())


def refusal(text: str, ledger: Ledger) -> str:
    reason = asked(text, B, ledger)
    assert isinstance(reason, Reason)
    assert reason.code is Code.GPU_BUSY
    assert str(reason).endswith(".")
    assert len(str(reason)) < REFUSAL_MAX
    return reason.sentence


def test_one_that_was_listed_as_created_may_have_run() -> None:
    listed = replace(make.entry(0, to=A, phase=GrantPhase.CREATED), until=Lapse.NEVER)
    assert left(listed).releasing == {ON_0: RELEASING}


FIRST, NEXT = (FirstProcess(pid=10, started=1_000), FirstProcess(pid=20, started=1_300))
AGAIN: Final = replace(A, id=ContainerId("a-main-1"))  # the next attempt at the same container
BESIDE: Final = {A.id: FIRST, A_SIDE.id: NEXT}


def test_a_process_of_the_attempt_before_is_waited_for_as_well() -> None:
    """It began before the first process of the attempt that ends now."""
    held = after(Ledger(), Created(1, A, make.grant(0, to=A)), Started(2, A.id), ProcessesFound(2, {A.id: FIRST}))
    again = Created(4, AGAIN, make.grant(0, to=AGAIN)), Started(5, AGAIN.id), ProcessesFound(5, {AGAIN.id: NEXT})
    ledger = after(held, Gone(3, (A.id,)), *again, Gone(NOW, (AGAIN.id,)))
    assert ledger.releasing == {ON_0: replace(RELEASING, first_started=FIRST.started)}
    looked = after(held, Gone(3, (A.id,)), Looked(3.5, {ON_0: 0}), *again, Gone(NOW, (AGAIN.id,)))
    assert looked.releasing == {ON_0: replace(RELEASING, first_started=NEXT.started)}  # the first has left nothing


@pytest.mark.parametrize("order", [(A, A_SIDE), (A_SIDE, A)])
@pytest.mark.parametrize("known", [BESIDE, {A.id: FIRST}, {A_SIDE.id: NEXT}])
def test_containers_that_end_together_are_waited_for_alike(
    order: tuple[Container, ...], known: dict[ContainerId, FirstProcess]
) -> None:
    ledger = make.ledger(*(make.entry(0, to=each) for each in order))
    left = after(ledger, ProcessesFound(2, known), Gone(NOW, (A.id, A_SIDE.id)))
    assert left.releasing == {ON_0: replace(RELEASING, first_started=FIRST.started if known == BESIDE else None)}


def test_where_nobody_will_tell_of_processes_nothing_waits() -> None:
    assert left(make.entry(0, to=A), replace(RULES, unknown_waits=False)) == Ledger()


@pytest.mark.parametrize("mode", Mode)
def test_other_pods_wait_and_its_own_do_not(mode: Mode) -> None:
    ledger = left(make.entry(0, to=A))
    assert asked(f"device=0;mode={mode}", A_SIDE, ledger) == (make.gpu(0),)
    assert "was just released by ml/a" in refusal(f"device=0;mode={mode}", ledger)
    assert asked(f"1;mode={mode}", B, ledger) == (make.gpu(1),)


SAID = {
    None: "ml/a: whether processes still hold it is not known yet; other pods can have it",
    1: "ml/a: 1 process still holds it; other pods can have it",
    2: "ml/a: 2 processes still hold it; other pods can have it once no process uses it, or 60 s after its release",
}


@pytest.mark.parametrize(("processes", "said"), SAID.items())
def test_the_sentence_says_who_left_and_what_is_waited_for(processes: int | None, said: str) -> None:
    ledger = Ledger(releasing={ON_0: replace(RELEASING, processes=processes)})
    for text in ("device=0", "all"):
        assert f"GPU 0 ({ON_0}) was just released by {said}" in refusal(text, ledger)


def test_too_few_because_some_are_releasing() -> None:
    ledger = Ledger(releasing={make.uuid(n): replace(RELEASING, processes=2) for n in range(3)})
    said = refusal("2", ledger)
    assert (
        "of the 4 that fit 1 can be granted now; the others were just released by ml/a: 2 processes still hold" in said
    )
    assert said.endswith("60 s after their release: ask for fewer, or wait until then.")
    beside = refusal("2", ledger.with_entry(make.entry(3, to=A)))
    assert "held by ml/a, ml/a (just released): wait until one is free" in beside


def test_a_very_long_name_leaves_room_for_the_rest() -> None:
    left = replace(RELEASING, pod="n" * 63 + "/" + "p" * 253, processes=2)
    for text in ("device=0", "4"):
        assert "wait until then" in refusal(text, Ledger(releasing={make.uuid(n): left for n in range(4)}))


LOOKS: dict[str, tuple[int | None, float, bool, Releasing | None]] = {
    "it began before the release": (0, NOW, True, RELEASING),
    "nobody can tell": (None, NOW + 1, True, RELEASING),
    "nobody can tell, and policy does not wait for that": (None, NOW + 1, False, None),
}


@pytest.mark.parametrize(("count", "began", "waits", "expected"), LOOKS.values(), ids=LOOKS)
def test_a_look(count: int | None, began: float, waits: bool, expected: Releasing | None) -> None:
    ledger = Ledger(releasing={ON_0: RELEASING})
    found = after(
        ledger, Looked(began, {} if count is None else {ON_0: count}), rules=replace(RULES, unknown_waits=waits)
    )
    assert found.releasing == ({} if expected is None else {ON_0: expected})
    assert (found is ledger) == (expected == RELEASING)
