"""Child processes: they inherit nothing, are waited for within limits, and always reaped.

`run` is for a command that ends, `LineProcess` for one that stays and exchanges lines with us. SIGKILL does not end a
process that hangs in the kernel: such a process is kept here until it ends, and nothing of its kind is started before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from nri_gpu.domain.bounds import GPU_INDEX_MAX
from nri_gpu.system.tasks import first_done

LINE_MAX: Final = 1 << 20  # bytes; a report of 16 GPUs with all their links has about 15 000
STDERR_KEPT_MAX: Final = 2048  # bytes
CALL_MAX: Final = 64  # characters of a call's name; NVML's longest has 52
KILL_S: Final = 1.0  # for a process to end after SIGKILL
_LOOK_S: Final = 0.005  # between two looks whether a process has ended
_IN_NAMES: Final = frozenset(string.ascii_letters + string.digits + "_")
_STDERR_END_S: Final = 0.2
UNKILLED: Final = (
    "still hangs in the kernel and cannot be killed, so no second process is started: see `dmesg | grep NVRM`; the GPU "
    "may need a reset, or the node a reboot"
)


def python() -> str:
    """Return the path of our interpreter. `sys.executable` is empty in a process that was started without PATH."""
    return sys.executable or str(Path("/proc/self/exe").resolve())


def program_of(command: Sequence[str]) -> str:
    """Return the name of a command's program, of a Python program its module."""
    module = command.index("-m") + 1 if "-m" in command and command[0] == python() else None
    return command[module] if module else Path(command[0]).name


def announced(message: Mapping[str, object]) -> str:
    """Return the call that a child announces, `nvmlDeviceGetName of GPU 2`, safe to print in a sentence and a log."""
    call, gpu = message.get("call"), message.get("gpu")
    name = "".join(filter(_IN_NAMES.__contains__, str(call)[:CALL_MAX])) if isinstance(call, str) else ""
    return (name or "a call without a name") + (
        f" of GPU {gpu}" if type(gpu) is int and 0 <= gpu <= GPU_INDEX_MAX else ""
    )


def ending(status: int | None) -> str:
    """Return how a process ended, in words. status: as subprocess has it, negative for a signal."""
    if status is None:
        return "cannot be killed"
    if status >= 0:
        return f"exited with status {status}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(-status).name}"
    return f"died of signal {-status}"


def _last_line(printed: bytes) -> str:
    lines = printed.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


class Unkilled(NamedTuple):
    """A process that was killed and has not ended. Nothing else of that program is started for that GPU."""

    program: str  # its name, of a Python program the module
    gpu_uuid: str  # empty where it serves no single GPU
    pid: int
    since_s: float  # when it was killed, seconds since the epoch


class _Kept(NamedTuple):
    since_s: float  # by the monotonic clock
    lives: Callable[[], bool]


_killed: Final[dict[Unkilled, _Kept]] = {}


def keep(process: Unkilled, lives: Callable[[], bool]) -> None:
    """Keep a killed process until it has ended. lives: returns whether it has not, and reaps it if it has."""
    if lives() and all(each.pid != process.pid or each == process for each in _killed):
        _killed.setdefault(process, _Kept(time.monotonic(), lives))
        asyncio.get_running_loop().call_later(KILL_S, keep, process, lives)
    else:
        _killed.pop(process, None)


def unkilled() -> tuple[Unkilled, ...]:
    """Return the processes that SIGKILL has not ended within KILL_S."""
    until_s = time.monotonic() - KILL_S
    return tuple(each for each, kept in _living().items() if kept.since_s <= until_s)


async def check_unkilled(program: str, gpu_uuid: str) -> None:
    """Wait for the end of a process that was killed just now. Raises: TimeoutError: an earlier process still lives."""
    kind = program, gpu_uuid
    await _until(lambda: all(each[:2] != kind or each in unkilled() for each in _living()), KILL_S)
    for each in _living():
        if each[:2] == kind:
            raise TimeoutError(f"{program} {each.pid} {UNKILLED}")


def _living() -> Mapping[Unkilled, _Kept]:
    return {each: kept for each, kept in _killed.items() if kept.lives()}


async def _until(done: Callable[[], bool], within_s: float) -> None:
    """Wait until it is so, or for so long. For processes: all else that tells of their end is a thread for each."""
    until_s = time.monotonic() + within_s
    while not done() and time.monotonic() < until_s:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_S)


class _StderrTail(asyncio.Protocol):
    """The end of what was printed: a noisy library must neither fill our memory nor block on a full pipe."""

    def __init__(self) -> None:
        self.tail = b""
        self.complete = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.complete.set()

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-STDERR_KEPT_MAX:]

    def last_line(self) -> str:
        return _last_line(self.tail)


class LineProcess:
    """A running child. Lines go both ways over one socket, its stderr goes to `last_line`.

    Plain Popen and not asyncio's own: only one party then ever reaps, so that a pid is never signalled after that.
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        kind: tuple[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stderr: tuple[asyncio.Transport, _StderrTail],
    ) -> None:
        self._popen = popen
        self._kind = kind
        self.printed = b""
        self._reader = reader
        self._writer = writer
        self._stderr_transport, self._stderr = stderr

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        given: bytes | None = None,
        gpu_uuid: str = "",
    ) -> Self:
        """Run `command` in `/`, in a session of its own.

        environment: empty without one. given: all of its stdin; without that its stdin is our lines. gpu_uuid: the one
        GPU that it serves, or empty.

        Raises: OSError; TimeoutError: an earlier process of its kind cannot be killed.
        """
        kind = program_of(command), gpu_uuid
        await check_unkilled(*kind)
        with contextlib.ExitStack() as undo:
            lines, its_lines = _pair(undo)
            stderr, its_stderr = _pair(undo)
            reader, writer = await asyncio.open_unix_connection(sock=lines, limit=LINE_MAX)
            undo.callback(writer.close)
            loop = asyncio.get_running_loop()
            transport, tail = await loop.create_unix_connection(_StderrTail, sock=stderr)
            undo.callback(transport.close)
            # Last, and without an await after it: a cancelled start leaves no process behind.
            stdin = its_lines.fileno() if given is None else _file_of(undo, given)
            popen = _spawn(command, stdin, its_lines, its_stderr, environment or {})
            if given is not None:
                os.close(stdin)
            undo.pop_all()
        its_lines.close()
        its_stderr.close()
        return cls(popen, kind, reader, writer, (transport, tail))

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def runs(self) -> bool:
        """Return whether the child has not ended; one that has is reaped by that."""
        return self._popen.poll() is None

    async def send(self, line: bytes) -> None:
        """Write one line. Only `receive` reports that the child is gone."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(line)
            await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next line, or empty once the child is gone or a line is longer than LINE_MAX."""
        try:
            return await self._reader.readline()
        except (ConnectionError, ValueError):
            return b""

    async def output(self) -> bytes:
        """Return all that the child prints, once it has closed its stdout; until then `printed` has it."""
        with contextlib.suppress(ConnectionError):
            while block := await self._reader.read(LINE_MAX):
                self.printed += block
        return self.printed

    @property
    def errors(self) -> bytes:
        """Return the end of what the child printed on stderr; it is complete once `end` has returned."""
        return self._stderr.tail

    def last_line(self) -> str:
        """Return the last line that the child printed on stderr; it is complete once `end` has returned."""
        return self._stderr.last_line()

    def kill(self) -> None:
        """Kill the child and what it started, and return at once. It is reaped when it ends."""
        self._kill()
        self._stderr_transport.close()

    async def end(self, grace_s: float) -> int | None:
        """Close the child's stdin, kill the child after `grace_s` seconds, and return its status.

        The status is None if the child hangs in the kernel, out of reach of signals. It is reaped when it ends.
        """
        self._writer.close()
        try:
            await self.reaped(grace_s)
        finally:
            self._kill()
        status = await self.reaped(KILL_S)
        if status is None:
            self._stderr_transport.close()
        else:
            await self._close()
        return status

    def _kill(self) -> None:
        self._writer.close()
        if self.runs:
            os.killpg(self.pid, signal.SIGKILL)
            keep(Unkilled(*self._kind, self.pid, time.time()), lambda: self.runs)

    async def reaped(self, within_s: float) -> int | None:
        """Return the child's status, or None if it has not ended by then."""
        await _until(lambda: not self.runs, within_s)
        return self._popen.returncode

    async def _close(self) -> None:
        # A process that it started may hold its stderr open longer.
        await first_done(self._stderr.complete.wait(), timeout_s=_STDERR_END_S)
        self._stderr_transport.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class Ended(NamedTuple):
    """The end of a command, and what it printed, of stderr the end. status: as subprocess has it."""

    status: int
    output: bytes
    errors: bytes

    @property
    def complaint(self) -> str:
        """Return the last line of the command's stderr."""
        return _last_line(self.errors)


async def run(
    command: Sequence[str],
    limit_s: float,
    *,
    text: str = "",
    environment: Mapping[str, str] | None = None,
    gpu_uuid: str = "",
) -> Ended:
    """Run a command to its end in `/`, in a session of its own.

    text: for its stdin. environment: empty without one. gpu_uuid: the one GPU that it serves, or empty. The command is
    killed if it takes longer than `limit_s`, and if we are cancelled. Its end is not awaited then, since a command that
    hangs in the kernel has none.

    Raises: OSError, if it cannot be started; TimeoutError, with a sentence if an earlier command cannot be killed.
    """
    process = await LineProcess.start(command, environment, text.encode(), gpu_uuid)
    reading = asyncio.create_task(process.output())
    try:
        async with asyncio.timeout(limit_s):
            await process.reaped(limit_s)
            await asyncio.wait({reading}, timeout=_STDERR_END_S)  # what it leaves behind may hold its stdout open
            status = await process.end(0.0)
    except BaseException:
        process.kill()
        raise
    finally:
        reading.cancel()
    if status is None:
        raise TimeoutError
    return Ended(status, process.printed, process.errors)


def _pair(undo: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    ours, its = socket.socketpair()
    undo.callback(its.close)
    undo.callback(ours.close)
    return ours, its


def _file_of(undo: contextlib.ExitStack, content: bytes) -> int:
    """Return a descriptor of a file in memory, at its beginning. Raises: OSError."""
    fd = os.memfd_create("stdin")
    undo.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _spawn(
    command: Sequence[str], stdin: int, lines: socket.socket, stderr: socket.socket, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process. Raises: OSError."""
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=lines.fileno(),
        stderr=stderr.fileno(),
        env=environment,
        cwd="/",
        start_new_session=True,
    )
