"""What a look at /proc tells, as the child that looks prints it and the daemon reads it."""

from __future__ import annotations

from msgspec import Struct

DeviceNumber = tuple[int, int]


class Use(Struct, frozen=True, tag="use"):
    """A process with NVIDIA's nodes open.

    started: clock ticks since boot; with the pid it names the process for good. program: the path of what it runs.
    cgroups: its paths in all hierarchies, each once. numbers: major and minor of the nodes.
    """

    pid: int
    started: int
    program: str
    cgroups: tuple[str, ...]
    numbers: tuple[DeviceNumber, ...]


class Extent(Struct, frozen=True, tag="extent"):
    """How far a look reached.

    processes: it saw. closed: of these, whose open files may not be seen. whole: no process of the host was hidden.
    cgroups: of the process that looked, as of `Use`.
    """

    processes: int
    closed: int
    whole: bool
    cgroups: tuple[str, ...] = ()
