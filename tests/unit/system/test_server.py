"""The one server behind the daemon's sockets, on real sockets and with clients of several users."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_gpu.system.server import Peer, ServerLimits, Service, listen
from tests.support.log import Log
from tests.support.scripted_runtime import until
from tests.support.serving import connected, served

LIMITS = ServerLimits(places=4, each=2, root=1, question_bytes=64, patience_s=10.0)
ALICE, BOB, CAROL = 1001, 1002, 1003
CROWDED = "too many connections at once"


class Answers:
    """Answers at once, but `wait` once it may, `bug` and `late bug` by one, and `much` by more than a socket takes."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.may = asyncio.Event()

    async def __call__(self, question: bytes, _: Peer) -> Iterable[bytes]:
        self.asked.append(question)
        if question == b"wait\n":
            await self.may.wait()
        if question == b"bug\n":
            raise OSError(5, "an error of ours, not of the connection")
        return self._late() if question == b"late bug\n" else [b"x" * (8 << 20) if question == b"much\n" else b"yes"]

    def _late(self) -> Iterator[bytes]:
        yield b"begun"
        raise ZeroDivisionError


@asynccontextmanager
async def serving(folder: Path, limits: ServerLimits = LIMITS) -> AsyncIterator[tuple[Path, Answers]]:
    path, answers = folder / "s", Answers()
    async with served(_public(path), _service(str(path), answers, limits)):
        yield path, answers


def _public(path: Path) -> socket.socket:
    listener = listen(path)
    path.parent.chmod(0o711)
    path.chmod(0o666)
    return listener


def _service(path: str, answers: Answers, limits: ServerLimits = LIMITS) -> Service:
    return Service(
        name="test", path=path, limits=limits, answer=answers, busy=b"busy", too_long=b"too long", bug=b"bug"
    )


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def said(client: socket.socket, question: bytes = b"") -> bytes:
    """Return all that comes, once nothing more does."""
    client.setblocking(False)
    if question:
        client.sendall(question)
    answer = b""
    try:
        while part := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def is_open(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True


async def settled() -> None:
    """Let the server take what has come."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_connection_that_asks_nothing_or_half_a_question_is_closed(folder: Path, clients: ExitStack) -> None:
    async with serving(folder, replace(LIMITS, patience_s=0.05)) as (path, answers):
        silent, half = (clients.enter_context(connected(path)) for _ in range(2))
        assert not any(await asyncio.gather(said(silent), said(half, b"y")))
    assert not answers.asked


async def test_a_question_may_come_in_pieces_and_may_be_too_long(folder: Path, clients: ExitStack) -> None:
    async with serving(folder) as (path, answers):
        client = clients.enter_context(connected(path))
        for byte in b"question":
            client.send(bytes([byte]))
            await settled()
        assert await said(client, b"\n") == b"yes"
        assert await said(clients.enter_context(connected(path)), b"x" * 65 + b"\n") == b"too long"
    assert answers.asked == [b"question\n"]


async def test_a_client_that_takes_no_answer_is_closed(folder: Path, clients: ExitStack) -> None:
    async with serving(folder, replace(LIMITS, patience_s=0.05)) as (path, _):
        deaf = clients.enter_context(connected(path))
        deaf.sendall(b"much\n")
        await asyncio.sleep(0.2)
        assert 0 < len(await said(deaf)) < 8 << 20


async def test_a_bug_ends_its_answer_alone(folder: Path, clients: ExitStack, log: Log) -> None:
    async with serving(folder) as (path, _):
        for question, answer in ((b"bug\n", b"bug"), (b"late bug\n", b"begun"), (b"question\n", b"yes")):
            assert await said(clients.enter_context(connected(path)), question) == answer
    raised = [type(line.exception) for line in log.said("bug in an answer")]
    assert raised == [OSError, ZeroDivisionError]


async def test_the_oldest_silent_connection_gives_way_with_one_warning(
    folder: Path, clients: ExitStack, log: Log
) -> None:
    async with serving(folder) as (path, _):
        silent = [clients.enter_context(connected(path)) for _ in range(4)]
        await settled()
        for _ in range(3):
            assert await said(clients.enter_context(connected(path)), b"question\n") == b"yes"
            await settled()
        assert [is_open(each) for each in silent] == [False, True, True, True]
        for _ in range(30):
            clients.enter_context(connected(path))
            await settled()
        assert not any(is_open(each) for each in silent)
    line = log.one(CROWDED)
    assert (line.level, line.fields["name"], line.fields["peer"]) == ("WARNING", "test", "uid 0")


async def test_who_waits_for_our_answer_never_gives_way(folder: Path, clients: ExitStack) -> None:
    async with serving(folder) as (path, answers):
        waiting = [clients.enter_context(connected(path)) for _ in range(3)]
        for each in waiting:
            each.sendall(b"wait\n")
        await until("their questions", lambda: len(answers.asked) == 3)
        silent = clients.enter_context(connected(path))
        await settled()
        waiting.append(clients.enter_context(connected(path)))
        waiting[-1].sendall(b"wait\n")  # in the place of the silent one, although that is the newest
        await until("the last one's question", lambda: len(answers.asked) == 4)
        assert await said(silent) == b""
        assert await said(clients.enter_context(connected(path))) == b"busy"
        answers.may.set()
        assert [await said(each) for each in waiting] == [b"yes"] * 4


async def test_who_asked_before_the_loop_could_read_it_does_not_give_way(folder: Path, clients: ExitStack) -> None:
    """As after a long call of ours: many connections wait to be accepted, each with its question."""
    async with serving(folder) as (path, _):
        asking = [clients.enter_context(connected(path)) for _ in range(4)]
        for each in asking:
            each.sendall(b"question\n")
        late = clients.enter_context(connected(path))
        answers = await asyncio.gather(*map(said, (*asking, late)))
    assert answers[:4] == [b"yes"] * 4


async def test_a_user_with_many_connections_shuts_out_nobody_else(folder: Path, clients: ExitStack) -> None:
    async with serving(folder) as (path, _):
        bob = clients.enter_context(connected(path, BOB))
        await settled()
        for _ in range(20):
            clients.enter_context(connected(path, ALICE))
            await settled()
        assert is_open(bob)
        assert await said(bob, b"question\n") == b"yes"


async def test_users_together_leave_root_its_places(folder: Path, clients: ExitStack) -> None:
    async with serving(folder) as (path, answers):
        for uid in (ALICE, BOB, CAROL):
            clients.enter_context(connected(path, uid)).sendall(b"wait\n")
        await until("their questions", lambda: len(answers.asked) == 3)
        assert await said(clients.enter_context(connected(path, ALICE))) == b"busy"
        root = clients.enter_context(connected(path))
        await settled()
        assert await said(clients.enter_context(connected(path, BOB))) == b"busy"
        assert await said(root, b"question\n") == b"yes"


async def test_an_address_with_many_connections_shuts_out_no_other(clients: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        at, answers = listener.getsockname(), Answers()
        async with served(listener, _service("port", answers)):
            for _ in range(20):
                clients.enter_context(socket.create_connection(at, source_address=("127.0.0.2", 0)))
                await settled()
            other = clients.enter_context(socket.create_connection(at))
            assert await said(other, b"question\n") == b"yes"
            for _ in range(2):
                waiting = clients.enter_context(socket.create_connection(at, source_address=("127.0.0.2", 0)))
                waiting.sendall(b"wait\n")
            await until("its questions", lambda: answers.asked.count(b"wait\n") == 2)
            assert await said(clients.enter_context(socket.create_connection(at, source_address=("127.0.0.2", 0))))
            assert await said(clients.enter_context(socket.create_connection(at)), b"question\n") == b"yes"


async def test_the_next_crowd_is_a_warning_again(folder: Path, clients: ExitStack, log: Log) -> None:
    async with serving(folder, replace(LIMITS, calm_s=0.1)) as (path, _):
        for _ in range(2):
            for _ in range(8):
                clients.enter_context(connected(path))
            await settled()
            await asyncio.sleep(0.2)
    assert len(log.said(CROWDED)) == 2


async def test_its_end_closes_every_connection_and_removes_the_socket(folder: Path, clients: ExitStack) -> None:
    async with serving(folder) as (path, answers):
        waiting, silent = (clients.enter_context(connected(path)) for _ in range(2))
        waiting.sendall(b"wait\n")
        await until("the question", lambda: bool(answers.asked))
    assert [await said(waiting), await said(silent)] == [b"", b""]
    assert not path.exists()


async def test_an_answer_that_nobody_waits_for_is_given_up(folder: Path, clients: ExitStack) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def lasting() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def answer(_: bytes, peer: Peer) -> Iterable[bytes]:
        await peer.while_there(lasting())
        return []

    path = folder / "s"
    async with served(listen(path), replace(_service(str(path), Answers()), answer=answer)):
        with connected(path) as client:
            client.sendall(b"question\n")
            await began.wait()
        await ended.wait()


def test_what_a_dead_daemon_left_is_replaced_and_a_file_is_kept(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "s"))
    with listen(folder / "s"), connected(folder / "s"):
        assert (folder / "s").stat().st_mode & 0o777 == 0o600
    (folder / "file").write_text("mine")
    for name, fault in (("file", "in use"), ("gone/s", "No such file")):
        with pytest.raises(OSError, match=fault):
            listen(folder / name)
    assert (folder / "file").read_text() == "mine"
