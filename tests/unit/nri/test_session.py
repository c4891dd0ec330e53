from __future__ import annotations

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.errors import RemoteProtocolError
from nri_gpu.nri.convert import DecodeError
from nri_gpu.nri.session import TRANSITIONS, Phase, Session, Step
from tests.support import builders as make

CONFIGURE, PART, LAST, EVENT, CLOSE = Step
WAYS: dict[str, tuple[tuple[Step, ...], Phase]] = {
    "the usual": ((CONFIGURE, LAST, EVENT, EVENT, CLOSE), Phase.CLOSED),
    "synchronized in parts": ((CONFIGURE, PART, PART, LAST), Phase.READY),
    "never synchronized, as a launched plugin of 1.7": ((CONFIGURE, EVENT), Phase.CONFIGURED),
    "closed before anything": ((CLOSE,), Phase.CLOSED),
    "closed half way through": ((CONFIGURE, PART, CLOSE), Phase.CLOSED),
    "closed twice": ((CLOSE, CLOSE), Phase.CLOSED),
}
WRONG: dict[str, tuple[Step, ...]] = {
    "event before Configure": (EVENT,),
    "Synchronize before Configure": (LAST,),
    "part before Configure": (PART,),
    "Configure twice": (CONFIGURE, CONFIGURE),
    "event between parts": (CONFIGURE, PART, EVENT),
    "Configure when ready": (CONFIGURE, LAST, CONFIGURE),
    "Synchronize twice": (CONFIGURE, LAST, LAST),
    "event after the end": (CLOSE, EVENT),
    "a new life after the end": (CLOSE, CONFIGURE),
}
POD = make.pod()


def walked(*steps: Step) -> Session:
    session = Session()
    for step in steps:
        session.step(step)
    return session


def part(*names: str, more: bool) -> bytes:
    containers = [make.container_message(make.container(of=POD, name=name)) for name in names]
    pods = [make.pod_message(POD)] if names else []
    return pb.SynchronizeRequest(pods=pods, containers=containers, more=more).SerializeToString()


@pytest.mark.parametrize(("steps", "phase"), WAYS.values(), ids=WAYS)
def test_a_session_goes(steps: tuple[Step, ...], phase: Phase) -> None:
    assert walked(*steps).phase is phase


@pytest.mark.parametrize("steps", WRONG.values(), ids=WRONG)
def test_a_step_at_the_wrong_time_is_the_runtimes_fault_and_moves_nothing(steps: tuple[Step, ...]) -> None:
    session = walked(*steps[:-1])
    before = session.phase
    with pytest.raises(RemoteProtocolError, match=f"came while the session was {before}"):
        session.step(steps[-1])
    assert session.phase is before


def test_the_table_names_every_phase_and_closing_is_always_possible() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert all(after[CLOSE] is Phase.CLOSED for after in TRANSITIONS.values())


def test_one_part() -> None:
    session = walked(CONFIGURE)
    listed = session.synchronize(part("a", "b", more=False))
    assert listed is not None
    assert [item.container.name for item in listed] == ["a", "b"]
    assert session.phase is Phase.READY


def test_many_parts_of_which_some_are_empty() -> None:
    session = walked(CONFIGURE)
    assert session.synchronize(part(more=True)) is None
    assert session.synchronize(part("a", more=True)) is None
    assert session.synchronize(part(more=True)) is None
    assert session.phase is Phase.SYNCHRONIZING
    listed = session.synchronize(part("b", more=False))
    assert [item.container.name for item in listed or ()] == ["a", "b"]


def test_a_containers_pod_may_come_in_a_later_part() -> None:
    session = walked(CONFIGURE)
    containers = [make.container_message(make.container(of=POD))]
    early = pb.SynchronizeRequest(containers=containers, more=True).SerializeToString()
    assert session.synchronize(early) is None
    listed = session.synchronize(pb.SynchronizeRequest(pods=[make.pod_message(POD)]).SerializeToString())
    assert [item.container.pod for item in listed or ()] == [POD]


@pytest.mark.parametrize("more", [True, False])
def test_of_a_part_at_the_wrong_time_nothing_is_kept(more: bool) -> None:
    session = walked()
    with pytest.raises(RemoteProtocolError):
        session.synchronize(part("early", more=more))
    session.step(CONFIGURE)
    listed = session.synchronize(part("right", more=False))
    assert [item.container.name for item in listed or ()] == ["right"]


def test_a_part_that_is_no_protobuf_moves_nothing() -> None:
    session = walked(CONFIGURE)
    with pytest.raises(DecodeError):
        session.synchronize(b"\xff")
    assert session.phase is Phase.CONFIGURED
