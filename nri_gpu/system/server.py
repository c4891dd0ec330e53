"""A server of local clients: a connection asks one question, has one answer, and ends.

No client can hold the daemon up or shut other clients out. If all places are taken, the connection that has asked
nothing for the longest time gives way, never one that awaits our answer. A client with too many loses one of its own.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.errors import cause_of
from nri_gpu.system.tasks import LogOnce, cancelled

ACCEPT_AGAIN_S: Final = 1.0  # after there was no file descriptor for a connection
CALM_S: Final = 5.0  # without that fault, after which it is over
BACKLOG: Final = 100
READ_BYTES: Final = 1 << 16
CREDENTIALS: Final = struct.Struct("3I")  # struct ucred of unix(7): pid, uid, gid
CROWDED: Final = "the longest idle connections are closed, and new ones are refused while all others wait for an answer"
T = TypeVar("T")


class ServerLimits(Struct, frozen=True, kw_only=True):
    """The share of the daemon that the clients of one socket may take. Root and our own user count as root."""

    places: int  # connections in all
    each: int  # connections of one uid or address, but of root
    root: int = 0  # places that only root has; on a Unix socket
    question_bytes: int
    patience_s: float  # for a question to come, and for its answer to be taken
    calm_s: float = 60.0  # without too many connections, after which the next time is logged again


class Service(Struct, frozen=True, kw_only=True):
    """A protocol of questions and answers on one socket."""

    name: str  # of the socket, in the log
    path: str  # of the socket, in the log
    limits: ServerLimits
    answer: Callable[[bytes, Peer], Awaitable[Iterable[bytes]]]  # its parts are made one by one, as they are taken
    end: bytes = b"\n"  # of a question
    busy: bytes  # the answer where there is no place
    too_long: bytes  # the answer to a question of more than question_bytes
    bug: bytes  # the answer where `answer` raises


class PeerGoneError(Exception):
    """The end of a client that went without its answer."""


class Peer:
    """The client that an answer is for. who: its uid on a Unix socket, else its address."""

    def __init__(self, reader: asyncio.StreamReader, who: int | str) -> None:
        self._reader = reader
        self.who = who

    async def while_there(self, answer: Awaitable[T]) -> T:
        """Return the answer's result. Raises: PeerGoneError, if the client went before; `answer` is then cancelled."""
        answering, going = asyncio.ensure_future(answer), asyncio.create_task(self._reader.read(1))
        try:
            await asyncio.wait({answering, going}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise PeerGoneError
            return answering.result()
        finally:
            await cancelled([answering, going])


def listen(path: Path) -> socket.socket:
    """Return a Unix socket that listens, for root alone, in place of an earlier one. Raises: OSError."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):  # a file is in the way
            path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Before bind(2), which gives the file the socket's own mode (Linux: net/unix/af_unix.c).
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


async def serve(listener: socket.socket, service: Service) -> None:
    """Serve until cancelled; then end what is being served, and remove the socket."""
    server = _Server(listener, service)
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()


class _Place:
    """A connection that is served. asked: whether its question was read."""

    def __init__(self, connection: socket.socket, who: int | str) -> None:
        self.connection = connection
        self.who = who
        self.asked = False

    def silent(self) -> bool:
        """Return whether nothing was asked, not even a question that the loop has yet to read."""
        if self.asked:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return True


class _Server:
    """The places of a socket and the connections that hold them, from its making to `close`."""

    def __init__(self, listener: socket.socket, service: Service) -> None:
        self._listener = listener
        self._service = service
        self._limits = service.limits
        self._log = {"name": service.name, "path": service.path}
        self._root = {0, os.geteuid()} if listener.family == socket.AF_UNIX else set()
        self._places: dict[asyncio.Task[None], _Place] = {}  # the oldest first
        self._faults, self._crowd = LogOnce(), LogOnce()
        self._crowded = -math.inf  # when there were too many connections last, on the loop's clock
        self._refused = 0  # connections without a descriptor
        self._pause: asyncio.TimerHandle | None = None
        self._calm: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    async def close(self) -> None:
        """End what is being served, and remove the socket."""
        self._loop.remove_reader(self._listener)
        for timer in (self._pause, self._calm):
            if timer:
                timer.cancel()
        unix = self._listener.family == socket.AF_UNIX
        self._listener.close()
        await cancelled(self._places)
        if unix:
            with suppress(OSError):
                Path(self._service.path).unlink()  # noqa: ASYNC240 - at the end, when nobody waits

    def _accept(self) -> None:
        """Accept one connection. asyncio's own server logs a hundred tracebacks a second when descriptors run out."""
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause_accepting(error)
            return
        if self._refused and self._calm is None:
            self._calm = self._loop.call_later(CALM_S, self._over)
        place = _Place(connection, _who(connection, address))
        if self._has_room(place.who):
            self._take(place)
        else:
            with suppress(OSError):
                connection.send(self._service.busy, socket.MSG_DONTWAIT)
            connection.close()

    def _pause_accepting(self, error: OSError) -> None:
        fault = f"{cause_of(error)}; trying again each second"
        self._faults.warning("socket accepts no connections", fault, **self._log)
        self._refused += 1
        if self._calm:
            self._calm.cancel()
            self._calm = None
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(ACCEPT_AGAIN_S, self._loop.add_reader, self._listener, self._accept)

    def _over(self) -> None:
        logger.bind(**self._log, attempt=self._refused).info("socket accepts connections again")
        self._faults.clear()
        self._refused, self._calm = 0, None

    def _has_room(self, who: int | str) -> bool:
        """Return whether there is a place, perhaps that of a silent connection, which then gives way."""
        rivals = self._rivals(who)
        if rivals is None:
            return True
        self._warn_of_crowd(who)
        silent = next((task for task in rivals if self._places[task].silent()), None)
        if silent:
            self._places.pop(silent)
            silent.cancel()
        return bool(silent)

    def _rivals(self, who: int | str) -> list[asyncio.Task[None]] | None:
        """Return the connections one of which has to free its place, the oldest first, or None if a place is free."""
        limits, places = self._limits, self._places.items()
        if who not in self._root:
            theirs = [task for task, place in places if place.who == who]
            if len(theirs) >= limits.each:
                return theirs
            others = [task for task, place in places if place.who not in self._root]
            if len(others) >= limits.places - limits.root:
                return others
        return list(self._places) if len(self._places) >= limits.places else None

    def _warn_of_crowd(self, who: int | str) -> None:
        now = self._loop.time()
        if now - self._crowded > self._limits.calm_s:
            self._crowd.clear()
        self._crowded = now
        peer = f"uid {who}" if isinstance(who, int) else who
        self._crowd.note("too many connections at once", CROWDED, **self._log, peer=peer)

    def _take(self, place: _Place) -> None:
        task = self._loop.create_task(self._serve(place))
        self._places[task] = place
        task.add_done_callback(lambda task: self._places.pop(task, None))
        task.add_done_callback(lambda _: place.connection.close())  # also where it ended before it began

    async def _serve(self, place: _Place) -> None:
        """Answer the question of a connection, and close the connection if it asks none or does not take the answer."""
        patience_s = self._limits.patience_s
        reader, writer = await asyncio.open_connection(sock=place.connection, limit=self._limits.question_bytes)
        try:
            async with asyncio.timeout(patience_s):
                question = await self._question(reader)
            place.asked = True
            answer = await self._answer(question, Peer(reader, place.who))
            async with asyncio.timeout(patience_s):
                await _write(writer, answer)
        except (OSError, EOFError, PeerGoneError):  # TimeoutError is an OSError; the client went
            pass
        except Exception:
            self._log_bug()
        finally:
            writer.transport.abort()

    async def _question(self, reader: asyncio.StreamReader) -> bytes | None:
        """Return the question, or None if it is too long. Raises: OSError; EOFError, if the client went."""
        try:
            return await reader.readuntil(self._service.end)
        except asyncio.LimitOverrunError:
            return None

    async def _answer(self, question: bytes | None, peer: Peer) -> Iterable[bytes]:
        """Return the parts of an answer. Raises: PeerGoneError."""
        if question is None:
            return [self._service.too_long]
        try:
            return await self._service.answer(question, peer)
        except PeerGoneError:
            raise
        except Exception:  # a client must not be able to end the daemon
            self._log_bug()
            return [self._service.bug]

    def _log_bug(self) -> None:
        logger.bind(**self._log).opt(exception=True).error("bug in an answer")


async def _write(writer: asyncio.StreamWriter, parts: Iterable[bytes]) -> None:
    """Write an answer and wait until it is taken. Between two parts the event loop answers the runtime."""
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)  # drain() alone does not let others run
    writer.close()
    await writer.wait_closed()


def _who(connection: socket.socket, address: Any) -> int | str:  # noqa: ANN401 - of a socket of any family
    """Return the uid of a Unix socket's client, or the address of any other client."""
    if connection.family != socket.AF_UNIX:
        return str(address[0])
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    uid: int = CREDENTIALS.unpack(credentials)[1]
    return uid
