"""The server on real sockets: what it answers, and that no client holds up the loop that answers the runtime."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from nri_gpu.daemon.metrics import LIMITS, MetricsController
from nri_gpu.daemon.view import View
from nri_gpu.policy.metrics_settings import MetricsSettings
from nri_gpu.system.server import ServerLimits
from tests.support.daemon import UUIDS
from tests.support.log import Log
from tests.support.metrics import entry, ledger, scraped, view
from tests.support.prometheus import free_port

VIEW: Final = view(ledger=ledger(entry(at, UUIDS[at % 4 :][:1]) for at in range(10_000)))
GET: Final = b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n"


class Answer(Struct, frozen=True):
    status: int
    headers: dict[str, str]
    body: bytes


@contextlib.asynccontextmanager
async def serving(
    listen: str, read: Callable[[], View] = lambda: VIEW, limits: ServerLimits = LIMITS
) -> AsyncIterator[None]:
    controller = MetricsController(MetricsSettings(listen=listen), read, limits)
    task = asyncio.create_task(controller.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def connected(listen: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if listen.startswith("/"):
        return await asyncio.open_unix_connection(listen)
    host, _, port = listen.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))


async def asked(listen: str, request: bytes = GET) -> Answer:
    reader, writer = await connected(listen)
    writer.write(request)
    said = await reader.read()
    writer.close()
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(first.split()[1]), headers, _joined(body) if "Transfer-Encoding" in headers else body)


def _joined(chunks: bytes) -> bytes:
    """Raises: ValueError: there is no last chunk, so the answer was cut off."""
    whole = b""
    while True:
        size, _, chunks = chunks.partition(b"\r\n")
        if not int(size, 16):
            return whole
        whole, chunks = whole + chunks[: int(size, 16)], chunks[int(size, 16) :].removeprefix(b"\r\n")


@pytest.fixture(params=["port", "IPv6", "socket"])
def listen(request: pytest.FixtureRequest, folder: Path) -> str:
    return {
        "port": f"127.0.0.1:{free_port()}",
        "IPv6": f"[::1]:{free_port()}",
        "socket": str(folder / "metrics.sock"),
    }[request.param]


async def test_a_scrape(listen: str, log: Log) -> None:
    async with serving(listen):
        said = await asked(listen)
        assert (said.status, said.headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert len(scraped(said.body.decode()).series("nri_gpu_grant_info")) == 10_000
    assert log.one("metrics are served").fields["path"] == listen
    with pytest.raises(OSError, match=r"No such file|Connect call failed"):
        await connected(listen)


REFUSED = {
    "another page": (b"GET / HTTP/1.1\r\n\r\n", 404, b"/metrics"),
    "to write": (b"POST /metrics HTTP/1.1\r\n\r\n", 405, b"only GET"),
    "no HTTP": (b"\x16\x03\x01\x02\r\n\r\n", 405, b"only GET"),
    "too long": (b"GET /" + b"x" * LIMITS.question_bytes + b"\r\n\r\n", 431, b"at most"),
}


@pytest.mark.parametrize(("request_", "status", "sentence"), REFUSED.values(), ids=REFUSED)
async def test_what_is_no_scrape_is_told_so(folder: Path, request_: bytes, status: int, sentence: bytes) -> None:
    async with serving(path := str(folder / "m")):
        said = await asked(path, request_)
        assert said.status == status
        assert sentence in said.body


async def test_a_file_in_the_way_is_kept(folder: Path, log: Log) -> None:
    path = folder / "m"
    path.write_text("mine")
    async with serving(str(path)):
        assert f"metrics.listen = {path}" in log.one("metrics are not served").fields["fault"]
    assert path.read_text() == "mine"


async def test_a_port_that_is_taken_is_said_and_ends_nothing(log: Log) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        async with serving(f"127.0.0.1:{taken.getsockname()[1]}"):
            fault = log.one("metrics are not served").fields["fault"]
    assert "Address already in use; trying again" in fault


async def test_an_address_of_others_from_the_command_line(log: Log) -> None:
    async with serving(f"0.0.0.0:{free_port()}"):
        assert "metrics.public = true" in log.one("metrics are not served").fields["fault"]


async def test_off_is_off(log: Log) -> None:
    async with serving(""):
        assert log.lines == []


async def test_a_bug_in_a_metric_ends_only_the_scrape(folder: Path, log: Log) -> None:
    def broken() -> View:
        raise ZeroDivisionError

    async with serving(path := str(folder / "m"), broken):
        with pytest.raises(ValueError, match="invalid literal"):  # cut off before the last chunk, so it is no scrape
            await asked(path)
        assert (await asked(path, b"GET / HTTP/1.1\r\n\r\n")).status == 404
    assert log.one("bug in an answer").fields["name"] == "metrics socket"


WITHOUT: Final = """
import sys
from loguru import logger
logger.remove()
logger.add(sys.stderr, format="{message} {extra}")
sys.modules["prometheus_client"] = None
from nri_gpu.daemon.metrics import MetricsController
from nri_gpu.policy.metrics_settings import MetricsSettings
MetricsController(MetricsSettings(listen=sys.argv[1]), lambda: 1 / 0)
"""


@pytest.mark.parametrize(("listen", "said"), [("127.0.0.1:9464", "metrics are not served"), ("", "")])
def test_a_broken_library_is_said_where_metrics_are_wanted(listen: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, listen], capture_output=True, text=True, check=True)
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)


def test_a_daemon_without_metrics_loads_no_library_of_prometheus() -> None:
    program = "import sys, nri_gpu.daemon.app; print([each for each in sys.modules if 'prometheus' in each])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
