from __future__ import annotations

from collections.abc import Sequence

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.errors import RemoteProtocolError
from nri_gpu.nri.session import Listed, Phase, Session, Step
from tests.support import builders as make

CONFIGURE, PART, LAST, EVENT = Step
WAYS: dict[str, tuple[tuple[Step, ...], Phase]] = {
    "synchronized in parts": ((CONFIGURE, PART, PART, LAST), Phase.READY),
    "never synchronized, as a launched plugin of 1.7": ((CONFIGURE, EVENT), Phase.CONFIGURED),
}
WRONG: dict[str, tuple[Step, ...]] = {
    "event before Configure": (EVENT,),
    "Synchronize before Configure": (LAST,),
    "Configure twice": (CONFIGURE, CONFIGURE),
    "event between parts": (CONFIGURE, PART, EVENT),
    "Synchronize twice": (CONFIGURE, LAST, LAST),
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


def test_many_parts_of_which_some_are_empty() -> None:
    session = walked(CONFIGURE)
    assert session.synchronize(part(more=True)) is None
    assert session.synchronize(part("a", more=True)) is None
    assert session.synchronize(part(more=True)) is None
    assert session.phase is Phase.SYNCHRONIZING
    listed = session.synchronize(part("b", more=False))
    assert [item.container.name for item in listed or ()] == ["a", "b"]
    assert not session.cut_short


@pytest.mark.parametrize("more", [True, False])
def test_of_a_part_at_the_wrong_time_nothing_is_kept(more: bool) -> None:
    session = walked()
    with pytest.raises(RemoteProtocolError):
        session.synchronize(part("early", more=more))
    session.step(CONFIGURE)
    listed = session.synchronize(part("right", more=False))
    assert [item.container.name for item in listed or ()] == ["right"]


def listed(*containers: pb.Container, pods: Sequence[pb.PodSandbox] = ()) -> tuple[Listed, ...]:
    found = walked(CONFIGURE).synchronize(pb.SynchronizeRequest(pods=pods, containers=containers).SerializeToString())
    assert found is not None
    return found


# A state that is not said to be listed runs: holding too long is the safe side.
@pytest.mark.parametrize("state", pb.ContainerState.values())
def test_a_listed_container_was_created_or_runs(state: pb.ContainerState) -> None:
    (item,) = listed(pb.Container(id="c", state=state, pod_sandbox_id="p"))
    assert item.created is (state == pb.CONTAINER_CREATED)
    assert (item.container.pod.id, item.container.pod.uid) == ("p", "p")  # though its pod is not listed


def test_markers_of_a_listed_container_are_read() -> None:
    (item,) = listed(pb.Container(id="c", pod_sandbox_id="p", env=["NRI_GPU_CLAIM_A=x", "PATH=/bin"]))
    assert item.container.markers == {"NRI_GPU_CLAIM_A": "x"}


def test_the_newest_comes_first_where_the_runtime_tells_when_else_its_own_order() -> None:
    for times, names in (((5, 7, 6), ["c1", "c2", "c0"]), ((0, 0, 0), ["c0", "c1", "c2"])):
        containers = [pb.Container(id=f"c{n}", name=f"c{n}", created_at=at) for n, at in enumerate(times)]
        assert [item.container.name for item in listed(*containers)] == names
