"""Processes by their numbers, as /proc tells of them."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import signal
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.mps import PIPE_FOLDER, SHM_FOLDER


class Process(Struct, frozen=True):
    """A process that will not be taken for another of the same number. started: clock ticks since boot."""

    pid: int
    started: int


def process_of(pid: int) -> Process | None:
    """The process of that number; None where there is none, or only what is left of one. Source: proc(5), stat."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # a program's name may hold blanks and parentheses
    return None if state in ("Z", "X") else Process(pid, int(fields[18]))


def user_of(pid: int) -> int | None:
    """The effective user id of a process as the host counts; None where /proc does not tell."""
    if pid <= 0:
        return None
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith("Uid:")), [])
    return int(found[2]) if len(found) == 5 else None


class ProcessWatch:
    """One living process, ours or not, held by a descriptor that is readable once it ended. Source: pidfd_open(2).

    ended: set then. Belongs to the loop that it was made in.
    """

    def __init__(self, process: Process) -> None:
        """Raises: OSError: it is gone."""
        self.process = process
        self.fd = os.pidfd_open(process.pid)
        if process_of(process.pid) != process:  # ended in between, and its number may be another's by now
            os.close(self.fd)
            raise ProcessLookupError(process.pid)
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fd, self._gone)

    @property
    def alive(self) -> bool:
        """Whether it has not ended. One system call."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not poll.poll(0)

    def send(self, number: signal.Signals) -> None:
        """A signal to this very process; nothing where it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def close(self) -> None:
        """Let go of it."""
        self._loop.remove_reader(self.fd)
        os.close(self.fd)

    def _gone(self) -> None:
        self._loop.remove_reader(self.fd)  # it stays readable
        self.ended.set()


NOTE: Final = "daemon"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DaemonFolder(Struct, frozen=True):
    """`<state folder>/mps/clients/<uuid>.<generation>`: its `pipe`, `log` and `shm` are the daemon's and its clients'.

    generation: never the same twice, so that nothing which clients of an earlier daemon left is in a later one's way;
    empty: a daemon of a version that had one folder for all its starts. The daemon writes a pid file of its own into
    `pipe`; ours, `<state folder>/mps/<uuid>/daemon`, is where no client reaches.
    """

    state: Path
    uuid: GpuUuid
    generation: str

    @property
    def folder(self) -> Path:
        """The daemon's own."""
        return clients(self.state) / f"{self.uuid}.{self.generation}" if self.generation else self.file.parent

    @property
    def pipe(self) -> Path:
        """Where its clients find it; they cannot write there."""
        return self.folder / PIPE_FOLDER

    @property
    def log(self) -> Path:
        """What it and its servers say, as often as clients give them reason to."""
        return self.folder / "log"

    @property
    def shm(self) -> Path:
        """Its /dev/shm, and its clients'."""
        return self.folder / SHM_FOLDER

    @property
    def file(self) -> Path:
        """The note."""
        return self.state / "mps" / self.uuid / NOTE

    def make(self) -> None:
        """Make the folders that are missing. Raises: OSError."""
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Servers run as their clients' user and reach in; the state folder above stays closed to them (daemon.py).
        for path, mode in ((self.folder, 0o755), (self.pipe, 0o755), (self.log, 0o755), (self.shm, 0o1777)):
            path.mkdir(exist_ok=True)
            path.chmod(mode)

    def note(self, process: Process) -> None:
        """Remember which process the daemon is."""
        fresh = self.file.with_name(f".{NOTE}.new")
        fresh.write_text(f"{process.pid} {process.started} {self.generation}\n")
        fresh.replace(self.file)

    def noted(self) -> Process | None:
        """The daemon that was noted, if it still lives."""
        try:
            pid, started = map(int, self.file.read_text().split()[:2])
        except (OSError, ValueError):
            return None
        process = process_of(pid)
        return process if process and process.started == started else None

    def forget(self) -> None:
        """There is no daemon any more, and the GPU is as it was before."""
        with suppress(OSError):
            self.file.unlink()


def clients(state: Path) -> Path:
    """The file system for all that daemons share with their clients."""
    return state / "mps" / "clients"


def mount_fault(base: Path) -> str:
    """Why there can be no daemon: clients could fill what is not theirs. Empty where they could not."""
    try:
        own, room = base.stat().st_dev != base.parent.stat().st_dev, os.statvfs(base)
    except OSError:
        own, room = False, None
    if own and room is not None and room.f_blocks and room.f_files:
        return ""
    return (
        f"no file system of {'limited size' if own else 'its own'} is mounted at {base}, where containers in mode=mps "
        r"write: start the systemd unit run-nri\x2dgpu-mps-clients.mount, or set mps.enabled in the chart "
        "(docs/mps.md), or ask with mode=shared."
    )


def noted_places(state: Path) -> tuple[DaemonFolder, ...]:
    """Places where somebody noted a daemon, living or not."""
    return tuple(_noted_place(state, note) for note in sorted((state / "mps").glob(f"*/{NOTE}")))


def _noted_place(state: Path, note: Path) -> DaemonFolder:
    words: list[str] = []
    with suppress(OSError, ValueError):
        words = note.read_text().split()
    return DaemonFolder(state, GpuUuid(note.parent.name), words[2] if len(words) > 2 else "")


def leftovers(state: Path, kept: frozenset[str]) -> tuple[Path, ...]:
    """What is neither a folder of those nor in one; also of versions that had all of a GPU beside its note."""
    return tuple(path for path in _all(state) if str(path) not in kept and str(path.parent) not in kept)


def _all(state: Path) -> Iterator[Path]:
    base = clients(state)
    for folder in state.joinpath("mps").glob("*/"):
        yield from (path for path in folder.iterdir() if folder == base or path.name not in (NOTE, f".{NOTE}.new"))


def remove(path: Path) -> None:
    """A tree that tenants made, and may still write to. No link is followed: all is done below opened directories.

    Not shutil.rmtree: that keeps a descriptor and a frame for each level, of which a tenant makes as many as it likes.
    Here a directory found is moved up beside the tree and is the next one, and no name is used twice.
    Raises: OSError: something is left of it, under another name.
    """
    top = os.open(path.parent, _DIRECTORY)
    try:
        waiting = [_moved(path.name, top, top)]
        while waiting:
            name = waiting.pop()
            if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=top)
                continue
            here = os.open(name, _DIRECTORY, dir_fd=top)
            try:
                waiting += _emptied(here, top)
            finally:
                os.close(here)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _emptied(here: int, top: int) -> list[str]:
    """Returns the names under which its directories are in `top` now."""
    with os.scandir(here) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_folder in entries:
        if not is_folder:
            os.unlink(name, dir_fd=here)
    return [_moved(name, here, top) for name, is_folder in entries if is_folder]


def _moved(name: str, here: int, top: int) -> str:
    away = f".{secrets.token_hex(8)}"
    os.rename(name, away, src_dir_fd=here, dst_dir_fd=top)
    return away
