"""Where one GPU's daemon has its folders, and what is remembered of it for whoever comes after us."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.mps.process import Process, process_of


class Place(Struct, frozen=True):
    """`<state folder>/mps/<uuid>`: `pipe`, `log` and `shm` are the daemon's, `daemon` is our note of its process.

    The daemon writes a pid file of its own into `pipe`, but so can every client: it is not to be believed.
    """

    state: Path
    uuid: GpuUuid

    @property
    def folder(self) -> Path:
        """The daemon's own."""
        return self.state / "mps" / self.uuid

    @property
    def pipe(self) -> Path:
        """Where its clients find it."""
        return self.folder / "pipe"

    @property
    def log(self) -> Path:
        """What it and its servers say."""
        return self.folder / "log"

    @property
    def shm(self) -> Path:
        """Its /dev/shm, and its clients'."""
        return self.folder / "shm"

    def make(self) -> None:
        """Make the folders that are missing; those that are there stay, for containers may have them mounted."""
        (self.state / "mps").mkdir(mode=0o700, exist_ok=True)
        # Servers run as their clients' user and reach in; the state folder above stays closed to them (daemon.py).
        for path, mode in ((self.folder, 0o755), (self.pipe, 0o755), (self.log, 0o755), (self.shm, 0o1777)):
            path.mkdir(exist_ok=True)
            path.chmod(mode)

    def note(self, process: Process) -> None:
        """Remember which process the daemon is."""
        fresh = self.folder / ".daemon.new"
        fresh.write_text(f"{process.pid} {process.started}\n")
        fresh.replace(self.folder / "daemon")

    def noted(self) -> Process | None:
        """The daemon that was noted, if it still lives."""
        try:
            pid, started = map(int, (self.folder / "daemon").read_text().split())
        except (OSError, ValueError):
            return None
        process = process_of(pid)
        return process if process and process.started == started else None

    def forget(self) -> None:
        """There is no daemon any more, and the GPU is as it was before."""
        with suppress(OSError):
            (self.folder / "daemon").unlink()


def noted_places(state: Path) -> tuple[Place, ...]:
    """Places where somebody noted a daemon, living or not."""
    return tuple(Place(state, GpuUuid(note.parent.name)) for note in sorted((state / "mps").glob("*/daemon")))
