"""Whoever reaches a socket of the daemon: one answer of the right form or none, and never a bug in the log.

metrics: a request of HTTP. control: a question on the control socket. dra: one of `nri-gpu dra`. They are asked on
real sockets. status: the other way round, what a daemon of another version answers to `nri-gpu status`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final

import msgspec
from loguru import logger

from nri_gpu.cli.ask_daemon import parse_answer
from nri_gpu.cli.render import Times
from nri_gpu.cli.status_page import status_page
from nri_gpu.daemon.answers import DaemonStatus
from nri_gpu.daemon.control import control_service
from nri_gpu.daemon.metrics import MetricsController
from nri_gpu.daemon.view import status_of
from nri_gpu.dra.daemon_socket import dra_service
from nri_gpu.dra.questions import Answer, AskUnprepare, ClaimFault, Question, Unprepared
from nri_gpu.policy.metrics_settings import MetricsSettings
from nri_gpu.system.server import listen
from nri_gpu.system.tasks import cancelled
from tests.fuzz.target import Target, chosen, named, scratch, words
from tests.support.metrics import view
from tests.support.serving import served

FOLDER: Final = scratch()
LOOP: Final = asyncio.new_event_loop()
ANSWER_S: Final = 5.0
HEAD: Final = re.compile(rb"HTTP/1\.1 (200|404|405|431) [A-Za-z ]+\r\n(?:[A-Za-z-]+: [ -~]+\r\n)+\r\n")
LENGTH: Final = re.compile(rb"\r\nContent-Length: ([0-9]+)\r\n")


def metrics(data: bytes) -> bool:
    answer = _asked("metrics.sock", data)
    if not answer:
        return False
    head = HEAD.match(answer)
    assert head, answer[:200]
    body = answer[head.end() :]
    if head[1] == b"200":
        assert body.endswith(b"0\r\n\r\n")
        return True
    length = LENGTH.search(head[0])
    assert length
    assert int(length[1]) == len(body)
    return False


def control(data: bytes) -> bool:
    answer = _asked("control.sock", data)
    if not answer:
        return False
    assert answer.endswith(b"\n")
    found = json.loads(answer)
    assert isinstance(found, dict)
    return "error" not in found


def dra(data: bytes) -> bool:
    answer = _asked("dra.sock", data)
    if not answer:
        return False
    found: Answer = msgspec.json.decode(answer, type=Answer)
    return not isinstance(found, ClaimFault)


def status(data: bytes) -> bool:
    try:
        found = parse_answer(data, DaemonStatus)
    except ValueError as error:
        assert error.args
        return False
    assert status_page(found, Times(1000.0), glance=False)
    return True


def _asked(name: str, data: bytes) -> bytes:
    """What is answered until the connection ends."""
    bugs: list[str] = []
    handler = logger.add(bugs.append, level="ERROR", format="{message}")
    try:
        return LOOP.run_until_complete(_exchange(name, data))
    finally:
        logger.remove(handler)
        assert not bugs, bugs


async def _exchange(name: str, data: bytes) -> bytes:
    async with asyncio.timeout(ANSWER_S), SERVED[name]():
        reader, writer = await asyncio.open_unix_connection(FOLDER / name)
        answer = b""
        try:
            with suppress(OSError):  # it was answered before it was read to its end
                writer.write(data)
                writer.write_eof()
            with suppress(ConnectionResetError):
                while part := await reader.read(1 << 16):
                    answer += part
        finally:
            writer.transport.abort()
        return answer


@asynccontextmanager
async def _metrics() -> AsyncIterator[None]:
    task = asyncio.create_task(MetricsController(MetricsSettings(listen=str(FOLDER / "metrics.sock")), view).run())
    try:
        await asyncio.sleep(0)  # it listens before it waits for anything
        yield
    finally:
        await cancelled([task])


def _control() -> AbstractAsyncContextManager[None]:
    path = FOLDER / "control.sock"
    return served(listen(path), control_service(path, {"status": lambda: STATUS, "inventory": dict}))


def _dra() -> AbstractAsyncContextManager[None]:
    path = FOLDER / "dra.sock"
    return served(listen(path), dra_service(path, _told))


async def _told(question: Question) -> Answer:
    return Unprepared() if isinstance(question, AskUnprepare) else ClaimFault("not here")


SERVED: Final[dict[str, Callable[[], AbstractAsyncContextManager[None]]]] = {
    "metrics.sock": _metrics,
    "control.sock": _control,
    "dra.sock": _dra,
}
STATUS: Final = status_of(view())
READERS: Final[dict[str, Callable[[bytes], object]]] = {
    "metrics": metrics,
    "control": control,
    "dra": dra,
    "status": status,
}
LISTENERS: Final = Target(
    chosen(READERS),
    good=[
        *named("metrics", "GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n", "GET /metrics?a=b HTTP/1.0\r\n\r\n"),
        *named("control", "status\n", " inventory \n"),
        *named("dra", '{"type":"AskUnprepare","uid":"a"}\n'),
        *named("status", msgspec.json.encode(STATUS)),
    ],
    bad=[
        *(each for name in READERS for each in named(name, b"", b"\xff\0\n", "{}\n", "[" * 2500 + "\n")),
        *named("metrics", "POST /metrics HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\n\r\n", "GET /metrics", "a" * 9000),
        *named("control", "status", "status\0\n", "a" * 100),
        *named("dra", '{"type":"AskView"}\n', '{"type":"AskPrepare"}\n', '{"type":"AskUnprepare","uid":"\xff"}'),
        *named("dra", '{"type":"AskUnprepare","uid":"../a"}\n'),
        *named("status", '{"error":"no"}', "null", '{"a":' * 1500, '{"node":{}}'),
    ],
    pieces=(
        *READERS,
        *("GET ", "HEAD ", "/metrics", " HTTP/1.1\r\n", "\r\n\r\n", "Content-Length: 99\r\n", "%2f", "?", "\r", "\n"),
        *words('"type": "AskView" "AskPrepare" "AskUnprepare" "uid": "claim": "results": "after": "report":'),
        *('"error":', '"node":', '"ledger":', "null", "-1", "1e999", '"\\ud800"', '"\\u001b[2J"', "[" * 2500, "\xff"),
    ),
    bytes_max=10_000,
)
TARGETS: Final = {"listeners": LISTENERS}
