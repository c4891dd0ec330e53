"""The results of a look at /proc, as the child that looks prints them and the daemon reads them."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

LIBCUDA: Final = "--libcuda"  # has the look read what processes map, too
CLOSED_MAX: Final = 512  # cgroups of processes whose open files may not be seen
DeviceNumber = tuple[int, int]


class Use(Struct, frozen=True, tag="use"):
    """A process with NVIDIA's nodes open, or, where that was asked, with libcuda mapped."""

    pid: int
    started: int  # with the pid it names the process for good; clock ticks since boot
    program: str  # the path of what it runs
    cgroups: tuple[str, ...]  # its paths in all hierarchies, each once
    numbers: tuple[DeviceNumber, ...]  # major and minor of the nodes
    libcuda: bool = False  # it maps the driver's CUDA library; false where that was not asked
    waits: bool = False  # in the kernel, where no signal reaches it as long as it does


class Extent(Struct, frozen=True, tag="extent"):
    """The reach of a look."""

    processes: int  # it saw
    closed: int  # of these, those whose open files may not be seen
    whole: bool  # no process of the host was hidden
    cgroups: tuple[str, ...] = ()  # of the process that looked, as of `Use`
    files: tuple[tuple[int, int, int], ...] = ()  # major, minor, and how often all processes have that node open
    closed_in: tuple[str, ...] = ()  # cgroups of the closed and the late; CLOSED_MAX of them: there may be more
    late: int = 0  # processes with so many files open that there was no time to read them

    @property
    def unread(self) -> str:
        """Return what there was no time for, as a sentence, or empty."""
        many = "so many files that a look has no time for them: `ls /proc/PID/fd | wc -l` finds them"
        return f"what {self.late} of {self.processes} processes have open, {many}" if self.late else ""
