"""Serves the metrics by HTTP: `GET /metrics` on a loopback port or a Unix socket, one answer a connection.

No scraper can hold the daemon up. A page is made and written at a time, and between two the event loop answers the
runtime. One that does not read is closed after PATIENCE_S, with no more than a page of ours in memory, and only
OPEN_MAX are served at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.metrics.reading import Reading
from nri_gpu.policy.metrics import MetricsSettings, address_of, metrics_faults
from nri_gpu.system.acceptor import Acceptor
from nri_gpu.system.tasks import LogOnce

Pages = Callable[[Reading], Iterator[bytes]]
HEAD_MAX: Final = 8192  # bytes of a request
OPEN_MAX: Final = 8
PATIENCE_S: Final = 10.0
BACKLOG: Final = 64
RETRY_S: Final = 30.0
WITHOUT_LIBRARY: Final = "prometheus-client is not installed: pip install 'nri-gpu[metrics]'"
CONFINED: Final = "the systemd unit needs its drop-in metrics.conf for a port, and none for a Unix socket"
NOT_SERVED: Final = "metrics are not served"


class MetricsController:
    """Serves while it runs. read: takes a reading. patience_s: for a whole request and its answer."""

    def __init__(
        self, settings: MetricsSettings, read: Callable[[], Reading], *, patience_s: float = PATIENCE_S
    ) -> None:
        self._listen = settings.listen
        self._read = read
        self._patience_s = patience_s
        self._faults = LogOnce()
        self._acceptor: Acceptor | None = None
        self._pages: Pages | None = None
        self._type = ""
        if self._listen:
            self._load(settings)

    async def run(self) -> None:
        """Serve until cancelled; where the policy wants no metrics, do nothing."""
        if self._pages is None:
            await asyncio.Event().wait()
        while True:
            try:
                listener = _listening(self._listen)
            except OSError as error:
                hint = CONFINED if error.errno == errno.EAFNOSUPPORT else f"trying again every {RETRY_S:g} s"
                self._faults.warning(NOT_SERVED, f"metrics.listen = {self._listen}: {error.strerror}; {hint}")
                await asyncio.sleep(RETRY_S)
            else:
                break
        self._acceptor = Acceptor("metrics socket", self._listen, listener, self._serve)
        logger.bind(path=self._listen).info("metrics are served")
        try:
            await asyncio.Event().wait()
        finally:
            await self._acceptor.close()
            self._remove_socket()

    def _remove_socket(self) -> None:
        if self._listen.startswith("/"):
            with suppress(OSError):
                Path(self._listen).unlink()

    def _load(self, settings: MetricsSettings) -> None:
        """Load Prometheus' library, before the daemon serves: it takes a tenth of a second."""
        if fault := next((sentence for _, sentence in metrics_faults(settings)), ""):
            logger.bind(fault=f"metrics.listen: {fault}").error(NOT_SERVED)  # from the command line
            return
        try:
            from nri_gpu.metrics.exposition import CONTENT_TYPE, pages
        except ImportError:
            logger.bind(fault=WITHOUT_LIBRARY).error(NOT_SERVED)
        else:
            self._pages, self._type = pages, CONTENT_TYPE

    async def _serve(self, connection: socket.socket) -> None:
        if self._acceptor and self._acceptor.serving > OPEN_MAX:
            connection.close()
            return
        reader, writer = await asyncio.open_connection(sock=connection, limit=HEAD_MAX)
        try:
            async with asyncio.timeout(self._patience_s):
                await self._answer(reader, writer)
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError):  # TimeoutError is an OSError; the client went
            pass
        except Exception:  # a scraper must not be able to end the daemon
            logger.opt(exception=True).error("bug in the metrics")
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises: EOFError: there is no request."""
        try:
            line = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]
        except asyncio.LimitOverrunError:
            writer.write(_refusal("431 Request Header Fields Too Large", f"a request has at most {HEAD_MAX} bytes"))
            return
        method, _, rest = line.partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            writer.write(_refusal("405 Method Not Allowed", "only GET is answered"))
        elif target != b"/metrics":
            writer.write(_refusal("404 Not Found", "the metrics are at /metrics"))
        else:
            head = f"HTTP/1.1 200 OK\r\nContent-Type: {self._type}\r\nTransfer-Encoding: chunked\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode())
            await self._write_pages(writer)

    async def _write_pages(self, writer: asyncio.StreamWriter) -> None:
        assert self._pages
        for page in self._pages(self._read()):
            writer.write(b"%x\r\n%b\r\n" % (len(page), page))
            await writer.drain()
            await asyncio.sleep(0)  # drain() alone does not let others run
        writer.write(b"0\r\n\r\n")


def _refusal(status: str, sentence: str) -> bytes:
    body = f"{sentence}\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


def _listening(listen: str) -> socket.socket:
    """A socket that listens there; one in the file system is root's alone. Raises: OSError."""
    address = address_of(listen)
    if address is None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(Path(listen).lstat().st_mode):  # an earlier daemon's; anything else is in the way
                Path(listen).unlink()
        os.fchmod(made.fileno(), 0o600)  # before bind(2), which gives it to the file
    else:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(listen if address is None else address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made
