"""The folders that MPS daemons share with their clients, and the notes by which a daemon is found again."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu.domain.finding import Finding, warning
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.mps import PIPE_FOLDER, SHM_FOLDER
from nri_gpu.system.process import Process, lives
from nri_gpu.system.selinux import SHARED, label_if_enabled, set_label
from nri_gpu.system.storage import text_of, write_whole

NOTE: Final = "daemon"
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DaemonFolder(Struct, frozen=True):
    """`<state folder>/mps/clients/<uuid>.<generation>`, whose `pipe`, `log` and `shm` a daemon shares with its clients.

    generation: new for each start, so that nothing which clients of an earlier daemon left affects a later one. The
    daemon writes its own pid file into `pipe`; our note of it, `<state folder>/mps/<uuid>/daemon`, is out of the
    clients' reach.
    """

    state: Path
    uuid: GpuUuid
    generation: str

    @property
    def folder(self) -> Path:
        return clients(self.state) / f"{self.uuid}.{self.generation}"

    @property
    def pipe(self) -> Path:
        """Return the folder of its sockets. Clients cannot write there."""
        return self.folder / PIPE_FOLDER

    @property
    def log(self) -> Path:
        """Return the folder of `output`, what the daemon and its servers print.

        In the foreground they write no log of their own.
        """
        return self.folder / "log"

    @property
    def shm(self) -> Path:
        """Return the /dev/shm of the daemon and its clients."""
        return self.folder / SHM_FOLDER

    @property
    def file(self) -> Path:
        """Return the note of the daemon's process."""
        return self.state / "mps" / self.uuid / NOTE

    def make(self, label: str | None = None) -> None:
        """Make the folders that are missing. Raises: OSError. label: of SELinux; None: what this host needs."""
        label = label_if_enabled(SHARED) if label is None else label
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Servers run as their clients' user and need access. The state folder above stays closed to them:
        # mps_daemon.py mounts theirs over it.
        for path, mode in ((self.folder, 0o755), (self.pipe, 0o755), (self.log, 0o755), (self.shm, 0o1777)):
            path.mkdir(exist_ok=True)
            path.chmod(mode)
            set_label(path, label)

    def note(self, process: Process) -> None:
        """Note which process the daemon is. Raises: OSError."""
        write_whole(self.file, f"{process.pid} {process.started} {self.generation}\n".encode())

    def noted(self) -> Process | None:
        """Return the noted process, unless it has ended. Raises: OSError: the note cannot be read."""
        try:
            process = Process(*map(int, self.file.read_text().split()[:2]))
        except (FileNotFoundError, TypeError, ValueError):
            return None
        return process if lives(process) else None

    def forget(self) -> None:
        """Remove the note: the daemon is gone, and the GPU's compute mode is restored."""
        with suppress(OSError):
            self.file.unlink()


def clients(state: Path) -> Path:
    """Return the file system for everything that daemons share with their clients."""
    return state / "mps" / "clients"


def mount_fault(base: Path) -> str:
    """Return why no daemon may be started, or empty: clients could fill a file system of the host."""
    try:
        mounted, size = base.stat().st_dev != base.parent.stat().st_dev, os.statvfs(base)
    except OSError:
        mounted, size = False, None
    if mounted and size is not None and size.f_blocks and size.f_files:
        return ""
    return (
        f"no file system of {'limited size' if mounted else 'its own'} is mounted at {base}, where containers in "
        r"mode=mps write: start the systemd unit run-nri\x2dgpu-mps-clients.mount, or set mps.enabled in the chart "
        "(docs/mps.md), or ask with mode=shared."
    )


def mps_advice(state: Path, *, enabled: bool) -> Iterator[Finding]:
    """Say why mode=mps is refused although policy allows it. Only root can look into the state folder."""
    if enabled and os.access(state, os.X_OK) and (fault := mount_fault(clients(state))):
        yield warning(
            "policy advice",
            f"every container that asks with mode=mps is refused: {fault}",
            r"systemctl start 'run-nri\x2dgpu-mps-clients.mount'    # docs/mps.md says how it is installed",
        )


def noted_folders(state: Path) -> tuple[DaemonFolder, ...]:
    """Return the folders whose daemon was noted, alive or not."""
    return tuple(_noted_folder(state, note) for note in sorted((state / "mps").glob(f"*/{NOTE}")))


def _noted_folder(state: Path, note: Path) -> DaemonFolder:
    words = (text_of(note) or "").split()
    return DaemonFolder(state, GpuUuid(note.parent.name), words[2] if len(words) > 2 else "")


def leftovers(state: Path, kept: frozenset[str]) -> tuple[Path, ...]:
    """Return what clients and daemons left: everything there but the kept folders."""
    return tuple(path for path in clients(state).glob("*") if str(path) not in kept)


def remove(path: Path) -> None:
    """Remove a tree that containers wrote, and may still write to. Follows no link: works in opened directories only.

    Not shutil.rmtree, which needs a descriptor and a stack frame for each level, and a container can make any number
    of levels. Here each directory found is moved up beside the tree, under a name used once, and emptied next.

    Raises: OSError: something is left, under another name.
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
    """Empty a directory and return the names that its directories have in `top` now."""
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
