"""The cgroups of processes, and whether a cgroup has any. Sources: cgroups(7), proc_pid_mountinfo(5)."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice, product
from pathlib import Path
from typing import Final, Self, TypeVar

from msgspec import Struct

from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess
from nri_gpu.domain.errors import UnseenError
from nri_gpu.system.proc import PROC, living_thread
from nri_gpu.system.process import Process, process_of
from nri_gpu.system.storage import text_of

T = TypeVar("T")

DEVICES: Final = "devices"  # the v1 controller
UNIFIED: Final = ""  # cgroup v2, where /proc/PID/cgroup names no controller
CONTROLLERS: Final = (DEVICES, UNIFIED)
EVENTS: Final = "cgroup.events"
_OCTAL: Final = re.compile(r"\\([0-7]{3})")  # how mountinfo writes blanks


class Mounted(Struct, frozen=True):
    """A mount, from mountinfo."""

    device: str  # the filesystem's number as text
    root: str  # the folder of the filesystem that is mounted
    place: str
    kind: str
    options: frozenset[str]

    @classmethod
    def parse(cls, line: str) -> Self:
        """Return the mount of one line. Raises: ValueError."""
        head, _, tail = line.partition(" - ")
        _, _, device, root, place, *_ = head.split(" ")
        kind, *_, options = tail.split(" ")  # the source between them may be empty
        return cls(device, _plain(root), _plain(place), kind, frozenset(options.split(",")))


def mounts_of(pid: int | str, proc: Path = PROC) -> tuple[Mounted, ...]:
    """Return all mounts that a process sees. Raises: UnseenError."""
    return tuple(parsed(living_thread(pid, proc) / "mountinfo", Mounted.parse))


def hierarchies(mounts: Iterable[Mounted]) -> Mapping[str, Path]:
    """Return where the whole hierarchies that can report devices are mounted, by controller."""
    found: dict[str, Path] = {}
    for each in mounts:
        if each.root == "/" and each.kind == "cgroup2":
            found.setdefault(UNIFIED, Path(each.place))
        elif each.root == "/" and each.kind == "cgroup" and DEVICES in each.options:
            found.setdefault(DEVICES, Path(each.place))
    return found


def cgroups_of(pid: int, proc: Path = PROC) -> Mapping[str, str]:
    """Return the paths of the cgroups that a process is in, by controller. Raises: UnseenError."""
    return dict(chain.from_iterable(parsed(living_thread(pid, proc) / "cgroup", _paths)))


class ContainerCgroups:
    """The cgroups of containers, as far as they can be seen from here.

    same_pids: whether the runtime knows processes by our PIDs. If not, processes are looked up in another /proc that is
    mounted here, and a container's process counts as seen only where its cgroup is.
    """

    def __init__(self, mounts: Iterable[Mounted] = (), *, same_pids: bool = False) -> None:
        known = tuple(mounts)
        self.same_pids = same_pids
        self._places = hierarchies(known)
        others = (Path(each.place) for each in known if each.kind == "proc" and each.root == "/")
        self._other_proc = next((each for each in others if each != PROC), None)

    def first_process(self, pid: int, container_id: ContainerId) -> FirstProcess | None:
        """Return a container's first process, with the container's own cgroup, or None if it cannot be found."""
        process = self._process(pid)
        if process is None:
            return None
        try:
            paths = cgroups_of(pid, self._proc)
        except UnseenError:  # the thread that was asked ended meanwhile; others of the process may live
            paths = {}
        own = (_own_cgroup(each, paths.get(each, ""), container_id) for each in self._visible())
        cgroup = next(filter(None, own), None)
        return FirstProcess(pid, process.started, cgroup) if cgroup or self.same_pids else None

    @property
    def seen(self) -> bool:
        """Return whether cgroups can be seen at all."""
        return bool(self._visible())

    def named(self, container_ids: Iterable[ContainerId]) -> Mapping[ContainerId, FirstProcess]:
        """Walk all cgroups of the host for those named after these containers, whose processes nobody knows."""
        wanted, found = set(container_ids), dict[ContainerId, FirstProcess]()
        for controller in self._visible() if wanted else ():
            place = self._places[controller]
            for above, folders, _ in os.walk(place):
                for name, each in product(folders, wanted - found.keys()):
                    path = f"/{Path(above, name).relative_to(place)}"
                    if cgroup := _own_cgroup(controller, path, each):
                        found[each] = FirstProcess(0, 0, cgroup)
        return found

    def lives(self, process: FirstProcess) -> bool:
        """Return whether a container has a process left: in its cgroup, or, if that cannot be seen, the first one."""
        folder = self._folder(process)
        try:
            if folder is not None:
                return "populated 1" in (folder / EVENTS).read_text() if self.tells(process) else any(_pids(folder))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENODEV)  # where it is gone, it is empty
        return self._process(process.pid) == Process(process.pid, process.started)

    def tells(self, process: FirstProcess) -> bool:
        """Return whether a change of `events_file` means that the last process is gone."""
        return process.cgroup is not None and process.cgroup.controller == UNIFIED and UNIFIED in self._places

    def events_file(self, process: FirstProcess) -> Path:
        """Return the file of a container's cgroup that changes with its last process, for one that `tells`."""
        folder = self._folder(process)
        assert folder
        return folder / EVENTS

    def pids(self, process: FirstProcess, most: int) -> tuple[int, ...]:
        """Return PIDs of a container's processes, at most `most`, so far as they have one here."""
        folder = self._folder(process)
        return tuple(islice(filter(None, _pids(folder)), most)) if folder else (process.pid,)

    @property
    def _proc(self) -> Path:
        return PROC if self.same_pids or self._other_proc is None else self._other_proc

    def _process(self, pid: int) -> Process | None:
        known = self.same_pids or self._other_proc is not None
        return process_of(pid, self._proc) if pid and known else None

    def _visible(self) -> tuple[str, ...]:
        """Return the usable hierarchies, the devices' first. Those of v1 list processes by the PIDs of the reader."""
        return tuple(each for each in CONTROLLERS if each in self._places and (self.same_pids or each == UNIFIED))

    def _folder(self, process: FirstProcess) -> Path | None:
        cgroup = process.cgroup
        if cgroup is None or cgroup.controller not in self._visible():
            return None
        return self._places[cgroup.controller] / cgroup.path.lstrip("/")


def parsed(path: Path, parse: Callable[[str], T]) -> list[T]:
    """Parse a kernel file's lines. A name in them may hold any character but a line break. Raises: UnseenError."""
    try:
        return [parse(line) for line in path.read_text(errors="surrogateescape").split("\n") if line]
    except ValueError as error:
        raise UnseenError(f"{path} has a line that nri-gpu does not understand: {error}") from error
    except OSError as error:
        raise UnseenError(f"{path} cannot be read: {error.strerror}", error) from error


def _paths(line: str) -> list[tuple[str, str]]:
    """Return controllers with the path of a line of /proc/PID/cgroup; cgroup v2's is unnamed. Raises: ValueError."""
    _, controllers, path = line.split(":", 2)
    return [(controller, path) for controller in controllers.split(",")]


def _own_cgroup(controller: str, path: str, container_id: ContainerId) -> Cgroup | None:
    """Return the cgroup at the part of a path named after the container, or None if no part is, or none below here.

    The name is `ID` by the driver cgroupfs, and `cri-containerd-ID.scope` by systemd, with the runtime's own word.
    """
    parts = path.split("/")
    names = (part.removesuffix(".scope") for part in parts)
    ends = (at for at, name in enumerate(names, 1) if name == container_id or _ends_with(name, container_id))
    end = None if ".." in parts else next(ends, None)
    return Cgroup(controller, "/".join(parts[:end])) if end else None


def _ends_with(name: str, container_id: ContainerId) -> bool:
    """Return whether a cgroup's name is some word and the container's id, but not CRI-O's monitor, `crio-conmon-ID`."""
    return name.endswith(f"-{container_id}") and not name.endswith(f"-conmon-{container_id}")


def _pids(folder: Path) -> Iterator[int]:
    """Yield PIDs of a cgroup and all below it, and 0 for a process without a PID here."""
    for below, _, _ in os.walk(folder):
        yield from map(int, (text_of(Path(below, "cgroup.procs")) or "").split())


def _plain(path: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)
