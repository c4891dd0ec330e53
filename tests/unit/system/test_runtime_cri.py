"""What CRI lists is read as bytes, in a child; what cannot be asked is said; containers are killed without a grace."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.nri.convert import DecodeError
from nri_gpu.policy.model import Policy
from nri_gpu.system.cri_list import cri_list
from nri_gpu.system.runtime_cri import CriError, RuntimeCri
from tests.support._pb import cri_tests_pb2 as lists
from tests.support.cri_server import PLACEHOLDER, CriServer, listing, sandbox
from tests.support.log import Log
from tests.support.waiting import aside, wait_for

POD = sandbox("a", "train")


def cri_at(path: Path) -> RuntimeCri:
    return RuntimeCri(lambda: replace(Policy.default().guard, cri_socket=str(path)))


@pytest.mark.parametrize(
    ("pods", "containers", "bad"),
    [
        ((POD,), (), ()),
        ((POD, sandbox("b", "b", annotations={"key": PLACEHOLDER})), (), ("b",)),
        ((POD, sandbox("b", "b", labels={PLACEHOLDER: "value"})), (), ("b",)),
        ((POD,), (lists.Container(id="c", pod_sandbox_id="a", annotations={"key": PLACEHOLDER}),), ("a",)),
        ((POD,), (lists.Container(id="c", pod_sandbox_id="gone", labels={"key": PLACEHOLDER}),), ("gone",)),
    ],
    ids=["none", "an annotation", "a label's key", "a container's annotation", "a container's label, without its pod"],
)
def test_whose_texts_are_not_utf8(
    pods: tuple[lists.PodSandbox, ...], containers: tuple[lists.Container, ...], bad: tuple[str, ...]
) -> None:
    assert cri_list(*listing(pods, containers).values()).not_utf8 == bad


def test_what_is_no_answer_is_an_error() -> None:
    with pytest.raises(DecodeError):
        cri_list(b"", b"\x0a\xff", b"")


async def test_a_list_of_any_size(folder: Path) -> None:
    """One pod's entry alone has more than gRPC takes by itself."""
    large = sandbox("b", "large", annotations={"filler": "x" * (16 << 20)})
    over = lists.Container(id="d", pod_sandbox_id="b", state=lists.CONTAINER_EXITED)
    answers = listing((POD, large), (lists.Container(id="c", pod_sandbox_id="a"), over))
    with CriServer(folder / "cri.sock", answers=answers):
        found = await cri_at(folder / "cri.sock").list()
    assert found.pods == {"a": "default/train", "b": "default/large"}
    assert (dict(found.containers), set(found.ended)) == ({"c": "a", "d": "b"}, {"d"})
    assert not found.not_utf8


async def test_why_it_cannot_be_asked(folder: Path) -> None:
    path = folder / "cri.sock"
    cri = cri_at(path)
    assert cri.hindrance() == f"{path}: no such file"
    with pytest.raises(CriError, match="no such file"):
        await cri.list()
    path.touch()
    assert cri.hindrance() == f"{path} is no socket"
    path.unlink()
    with CriServer(path, answers={}):
        assert cri.hindrance() == ""
        with pytest.raises(CriError, match="UNIMPLEMENTED: no Version here"):
            await cri.list()


async def test_one_that_hangs_is_given_up(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "cri.sock"))
        silent.listen()
        with pytest.raises(CriError, match=r"no answer on .*cri\.sock within 0 s|DEADLINE_EXCEEDED|UNAVAILABLE"):
            await RuntimeCri(
                lambda: replace(Policy.default().guard, cri_socket=str(folder / "cri.sock")), limit_s=0.4
            ).list()


async def test_containers_are_killed(folder: Path, log: Log) -> None:
    with CriServer(folder / "cri.sock") as server:
        cri_at(folder / "cri.sock").kill({"a": "ml/a"}, "tested")
        await aside(wait_for, "the kill", lambda: "a" in server.stopped, 20)
        assert server.stopped == {"a": 0}
        await aside(wait_for, "the log", lambda: bool(log.said("container stopped")), 20)
    assert log.one("container stopped").fields["pod_name"] == "ml/a"
