"""The service of the metrics by HTTP: `GET /metrics` on a loopback port or a Unix socket, one answer a connection.

No scraper can hold the daemon up. A page is made and written at a time, and between two the event loop answers the
runtime. A scraper that does not read is closed, with no more than a page of ours in memory.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from loguru import logger

from nri_gpu.daemon.view import View
from nri_gpu.domain.errors import cause_of
from nri_gpu.policy.metrics_settings import MetricsSettings, address_of, metrics_faults
from nri_gpu.system.server import BACKLOG, Peer, ServerLimits, Service, listen, serve
from nri_gpu.system.tasks import LogOnce

Pages = Callable[[View], Iterator[bytes]]
LIMITS: Final = ServerLimits(places=8, each=4, question_bytes=8192, patience_s=10.0)
RETRY_S: Final = 30.0
CONFINED: Final = "the systemd unit needs its drop-in metrics.conf for a port, and none for a Unix socket"
NOT_SERVED: Final = "metrics are not served"


class MetricsController:
    """The metrics' server. view: the daemon now. sampled: as in `ControlSocket`, for pages that say what GPUs do."""

    def __init__(
        self,
        settings: MetricsSettings,
        view: Callable[[], View],
        limits: ServerLimits = LIMITS,
        sampled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._listen = settings.listen
        self._view = view
        self._sampled = sampled if settings.usage else None
        self._limits = limits
        self._faults = LogOnce()
        self._pages: Pages | None = None
        self._type = ""
        if self._listen:
            self._load(settings)

    async def run(self) -> None:
        """Serve until cancelled; if the policy wants no metrics, do nothing."""
        if self._pages is None:
            await asyncio.Event().wait()
        while True:
            try:
                listener = _listening(self._listen)
            except OSError as error:
                hint = CONFINED if error.errno == errno.EAFNOSUPPORT else f"trying again every {RETRY_S:g} s"
                self._faults.warning(NOT_SERVED, f"metrics.listen = {self._listen}: {cause_of(error)}; {hint}")
                await asyncio.sleep(RETRY_S)
            else:
                break
        logger.bind(path=self._listen).info("metrics are served")
        await serve(listener, self._service())

    def _load(self, settings: MetricsSettings) -> None:
        """Load Prometheus' library, before the daemon serves: it takes a tenth of a second."""
        if fault := next((sentence for _, sentence in metrics_faults(settings)), ""):
            logger.bind(fault=f"metrics.listen: {fault}").error(NOT_SERVED)  # from the command line
            return
        try:
            from nri_gpu.daemon.metrics_page import CONTENT_TYPE, pages
        except ImportError as error:
            logger.bind(fault=str(error)).error(NOT_SERVED)
        else:
            self._pages, self._type = pages, CONTENT_TYPE

    def _service(self) -> Service:
        most = self._limits.question_bytes
        return Service(
            name="metrics socket",
            path=self._listen,
            limits=self._limits,
            answer=self._answer,
            end=b"\r\n\r\n",
            busy=_refusal("503 Service Unavailable", "too many connections at once; try again"),
            too_long=_refusal("431 Request Header Fields Too Large", f"a request has at most {most} bytes"),
            bug=b"",
        )

    async def _answer(self, request: bytes, _peer: Peer) -> Iterable[bytes]:
        method, _, rest = request.partition(b"\r\n")[0].partition(b" ")
        if method != b"GET":
            return [_refusal("405 Method Not Allowed", "only GET is answered")]
        if rest.partition(b" ")[0].partition(b"?")[0] != b"/metrics":
            return [_refusal("404 Not Found", "the metrics are at /metrics")]
        if self._sampled:
            await self._sampled()
        return self._page()

    def _page(self) -> Iterator[bytes]:
        """Yield the parts of the answer. An answer that is cut off by a bug lacks the last part."""
        assert self._pages
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {self._type}\r\nTransfer-Encoding: chunked\r\n"
        yield f"{head}Connection: close\r\n\r\n".encode()
        for page in self._pages(self._view()):
            yield b"%x\r\n%b\r\n" % (len(page), page)
        yield b"0\r\n\r\n"


def _refusal(status: str, sentence: str) -> bytes:
    body = f"{sentence}\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


def _listening(at: str) -> socket.socket:
    """Return a socket that listens at `at`; a socket in the file system is root's alone. Raises: OSError."""
    address = address_of(at)
    if address is None:
        return listen(Path(at))
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made
