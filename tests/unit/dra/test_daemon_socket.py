"""The daemon's socket for the driver process and its client, over a real Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from nri_gpu.domain.resource_claim import AllocatedClaim, AllocatedResult, ClaimUid
from nri_gpu.dra.daemon_client import DaemonAwayError, DaemonClient
from nri_gpu.dra.daemon_socket import LIMITS, dra_service
from nri_gpu.dra.questions import (
    DRA_SOCKET,
    Answer,
    AskPrepare,
    AskUnprepare,
    AskView,
    ClaimFault,
    DriverReport,
    NodeView,
    Prepared,
    Question,
    Unprepared,
)
from nri_gpu.system.server import ServerLimits, listen
from tests.support.log import Log
from tests.support.serving import served

CLAIM = AllocatedClaim(
    uid=ClaimUid("c"), namespace="ml", name="x", pods={}, results=(AllocatedResult(request="r", pool="p", device="d"),)
)
VIEW = NodeView(number=7, driver="gpu.nri.io", dir="/d", registry_dir="/r", cdi_dir="/c")
ANSWERS: list[tuple[Question, Answer]] = [
    (AskView(6, DriverReport(2, ("DRADeviceTaints",), "no server")), VIEW),
    (AskPrepare(CLAIM), Prepared((("NRI_GPU_CLAIM_C_0", "v1;claim=c"),), required=True)),
    (AskUnprepare(ClaimUid("c")), Unprepared()),
    (AskUnprepare(ClaimUid("d")), ClaimFault("no", passing=True)),
]
Say = Callable[[Question], Awaitable[Answer]]


async def known(question: Question) -> Answer:
    return dict((msgspec.json.encode(each), answer) for each, answer in ANSWERS)[msgspec.json.encode(question)]


@contextlib.asynccontextmanager
async def listening(folder: Path, say: Say = known, limits: ServerLimits = LIMITS) -> AsyncIterator[Path]:
    path = folder / DRA_SOCKET
    async with served(listen(path), dra_service(path, say, limits)):
        yield path
    assert not path.exists()


async def said(path: Path, question: bytes) -> Answer | None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(question)
    answer = await reader.read()
    writer.close()
    found: Answer | None = msgspec.json.decode(answer, type=Answer) if answer else None
    return found


@pytest.mark.parametrize(("question", "answer"), ANSWERS, ids=[type(each).__name__ for each, _ in ANSWERS])
async def test_each_question_has_its_answer(tmp_path: Path, question: Question, answer: Answer) -> None:
    async with listening(tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await DaemonClient(tmp_path).ask(question) == answer


GARBAGE = {
    "no JSON": (b"view\n", "cannot read this question"),
    "no text": (b"\xff\xfe\n", "cannot read this question"),
    "an unknown question": (b'{"type":"AskAll"}\n', "cannot read this question"),
    "a claim without a name": (b'{"type":"AskPrepare","claim":{}}\n', "cannot read this question"),
    "a claim's UID that forges fields of a marker": (
        msgspec.json.encode(AskPrepare(replace(CLAIM, uid=ClaimUid("c;device=1")))) + b"\n",
        'the claim\'s UID "c;device=1" is not of letters, digits and dashes',
    ),
    "a claim's UID that leaves the folder": (
        b'{"type":"AskUnprepare","uid":"../x"}\n',
        'the claim\'s UID "../x" is not of letters, digits and dashes',
    ),
    "deep": (b"[" * 100_000 + b"\n", "cannot read this question"),
    "too long": (b"x" * (LIMITS.question_bytes + 2) + b"\n", "at most 1048576 bytes"),
}


@pytest.mark.parametrize(("question", "sentence"), GARBAGE.values(), ids=GARBAGE)
async def test_garbage_is_told_so(tmp_path: Path, question: bytes, sentence: str) -> None:
    async with listening(tmp_path) as path:
        answer = await said(path, question)
        assert isinstance(answer, ClaimFault)
        assert sentence in answer.sentence
        assert await DaemonClient(tmp_path).ask(ANSWERS[2][0]) == Unprepared()


async def test_a_bug_is_a_fault(tmp_path: Path, log: Log) -> None:
    async def broken(question: Question) -> Answer:
        raise OSError(5, str(question))

    async with listening(tmp_path, broken):
        answer = await DaemonClient(tmp_path).ask(AskView())
    assert answer == ClaimFault("a bug of nri-gpu; the log of its daemon has the traceback")
    assert log.one("bug in an answer").fields["name"] == "dra socket"


async def test_nobody_waits_for_the_view_of_a_client_that_is_gone(tmp_path: Path) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def say(_: Question) -> Answer:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Unprepared()

    async with listening(tmp_path, say):
        asking = asyncio.create_task(DaemonClient(tmp_path).ask(AskView()))
        await began.wait()
        asking.cancel()
        await ended.wait()


async def test_a_claim_is_prepared_to_the_end_although_the_client_is_gone(tmp_path: Path) -> None:
    began, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def say(_: Question) -> Answer:
        began.set()
        await go_on.wait()
        ended.set()
        return Unprepared()

    async with listening(tmp_path, say):
        asking = asyncio.create_task(DaemonClient(tmp_path).ask(AskPrepare(CLAIM)))
        await began.wait()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        go_on.set()
        await ended.wait()


async def test_an_absent_daemon_is_a_sentence(tmp_path: Path) -> None:
    client = DaemonClient(tmp_path)
    with pytest.raises(DaemonAwayError, match="start it with --dra"):
        await client.ask(AskView())
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / DRA_SOCKET))
    with pytest.raises(DaemonAwayError, match="start it with --dra"):
        await client.ask(AskView())


async def test_a_daemon_that_does_not_answer_is_a_sentence(tmp_path: Path) -> None:
    async def never(_: Question) -> Answer:
        return await asyncio.Future[Answer]()

    async with listening(tmp_path, never):
        with pytest.raises(DaemonAwayError, match=r"did not answer within 0.05 s"):
            await DaemonClient(tmp_path, timeout_s=0.05).ask(AskUnprepare(ClaimUid("c")))


@pytest.mark.parametrize("answer", [b"", b"no\n", b'{"type":"NodeView"}\n', b"x" * (17 << 20)])
async def test_an_answer_that_is_none_is_a_sentence(tmp_path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        with contextlib.suppress(OSError):
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / DRA_SOCKET)
    async with server:
        with pytest.raises(DaemonAwayError, match="sent no answer that this version knows, or exited"):
            await DaemonClient(tmp_path).ask(AskView())
