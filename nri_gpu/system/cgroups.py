"""The cgroups of processes, and whether a cgroup has any. Sources: cgroups(7), proc_pid_mountinfo(5)."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Final, Self, TypeVar

from msgspec import Struct

from nri_gpu.domain.container import Cgroup, ContainerId, FirstProcess
from nri_gpu.domain.errors import UnseenError, cause_of
from nri_gpu.system.proc import PROC, living_thread
from nri_gpu.system.process import Process, lives, process_of
from nri_gpu.system.storage import read_bytes

T = TypeVar("T")

DEVICES: Final = "devices"  # the v1 controller
UNIFIED: Final = ""  # cgroup v2, where /proc/PID/cgroup names no controller
CONTROLLERS: Final = (DEVICES, UNIFIED)
EVENTS: Final = "cgroup.events"
FOLDERS_MAX: Final = 64  # cgroups of one container that one look reads on v1: a container may make more below its own
_GONE: Final = (errno.ENOENT, errno.ENODEV)  # a cgroup that was removed
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
    return _cgroups_of_thread(living_thread(pid, proc))


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
        self._walks: dict[Path, Future[bool]] = {}  # through cgroups with more than FOLDERS_MAX below them
        self._thread = ThreadPoolExecutor(1, "nri-gpu-cgroups")

    def first_process(self, pid: int, container_id: ContainerId) -> FirstProcess | None:
        """Return a container's first process, with the container's own cgroup, or None if it cannot be found."""
        process = process_of(pid, self._proc) if self._knows(pid) else None
        if process is None:
            return None
        cgroup = self._cgroup_of(f"{self._proc}/{pid}", container_id)
        cgroup = cgroup or self._cgroup_of(living_thread(pid, self._proc), container_id)
        return FirstProcess(pid, process.started, cgroup) if cgroup or self.same_pids else None

    @property
    def seen(self) -> bool:
        """Return whether cgroups can be seen at all."""
        return bool(self._visible())

    def named(self, container_ids: Set[ContainerId], known: Set[ContainerId]) -> Mapping[ContainerId, FirstProcess]:
        """Walk all cgroups of the host for those that are named after these containers and have a process.

        known: other containers of this runtime. Nothing is looked for below their cgroups: a container may give any
        name to a cgroup that it makes there. Where the node is a container, ours lie below that of another runtime.

        Raises: OSError: a cgroup cannot be looked into, so that one below it may have been missed.
        """
        found: dict[ContainerId, tuple[Cgroup, ...]] = {}
        for controller in self._visible() if container_ids else ():
            for container_id, path in _named_below(str(self._places[controller]), container_ids | known):
                cgroup = Cgroup(controller, path)
                if container_id in container_ids and self._is_occupied(cgroup):
                    found[container_id] = (*found.get(container_id, ()), cgroup)
        return {id_: FirstProcess(0, 0, cgroup, tuple(others)) for id_, (cgroup, *others) in found.items()}

    def lives(self, process: FirstProcess) -> bool:
        """Return whether a container has a process left: in a cgroup, or, if none can be seen, the first one.

        One whose processes cannot be seen has.
        """
        if cgroups := self._cgroups(process):
            return any(map(self._is_occupied, cgroups))
        return not self._knows(process.pid) or lives(Process(process.pid, process.started), self._proc)

    def tells(self, process: FirstProcess) -> bool:
        """Return whether changes of `events_files` mean that the last process is gone."""
        cgroups = self._cgroups(process)
        return bool(cgroups) and all(each.controller == UNIFIED for each in cgroups)

    def events_files(self, process: FirstProcess) -> tuple[Path, ...]:
        """Return the files of a container's cgroups that change with its last process, for one that `tells`."""
        return tuple(self._folder(each) / EVENTS for each in self._cgroups(process))

    def pids(self, process: FirstProcess, most: int) -> tuple[int, ...]:
        """Return PIDs of a container's processes, at most `most`, of FOLDERS_MAX cgroups, if they have one here."""
        cgroups, found = self._cgroups(process), list[int]()
        folders = chain.from_iterable(_below(self._folder(each), FOLDERS_MAX) for each in cgroups)
        with suppress(OSError):
            found.extend(islice(filter(None, _pids(islice(folders, FOLDERS_MAX))), most))
        return tuple(found) if cgroups else (process.pid,)

    @property
    def _proc(self) -> Path:
        return PROC if self.same_pids or self._other_proc is None else self._other_proc

    def _cgroup_of(self, thread: str | Path, container_id: ContainerId) -> Cgroup | None:
        try:
            paths = _cgroups_of_thread(thread)
        except UnseenError:  # it ended meanwhile; others of the process may live
            return None
        own = (_own_cgroup(each, paths.get(each, ""), container_id) for each in self._visible())
        return next(filter(None, own), None)

    def _knows(self, pid: int) -> bool:
        return bool(pid) and (self.same_pids or self._other_proc is not None)

    def _visible(self) -> tuple[str, ...]:
        """Return the usable hierarchies, the devices' first. Those of v1 list processes by the PIDs of the reader."""
        return tuple(each for each in CONTROLLERS if each in self._places and (self.same_pids or each == UNIFIED))

    def _cgroups(self, process: FirstProcess) -> tuple[Cgroup, ...]:
        known = filter(None, (process.cgroup, *process.others))
        return tuple(each for each in known if each.controller in self._visible())

    def _folder(self, cgroup: Cgroup) -> Path:
        return self._places[cgroup.controller] / cgroup.path.lstrip("/")

    def _is_occupied(self, cgroup: Cgroup) -> bool:
        """Return whether a cgroup or one below it has a process; it has none if it is gone."""
        folder = self._folder(cgroup)
        try:
            if cgroup.controller == UNIFIED:
                return "populated 1" in (folder / EVENTS).read_text()
            return self._has_pids(folder)
        except OSError as error:
            return error.errno not in _GONE

    def _has_pids(self, folder: Path) -> bool:
        """Return whether a cgroup of v1 or one below it has a process. Raises: OSError.

        If the first FOLDERS_MAX have none and there are more, a thread walks through all of them. Until a later call
        takes its result, the answer is that there is a process.
        """
        if walk := self._walks.get(folder):
            if not walk.done():
                return True
            self._walks.pop(folder, None)  # a walk through all cgroups asks as well, in its own thread
            return walk.result()
        below = _below(folder, FOLDERS_MAX)
        if any(_pids(islice(below, FOLDERS_MAX))):
            return True
        if next(below, None) is None:
            return False
        self._walks[folder] = self._thread.submit(lambda: any(_pids(_below(folder))))
        return True


def parsed(path: str | Path, parse: Callable[[str], T]) -> list[T]:
    """Parse a kernel file's lines. A name in them may hold any character but a line break. Raises: UnseenError."""
    try:
        return [parse(line) for line in os.fsdecode(read_bytes(path, -1)).split("\n") if line]
    except ValueError as error:
        raise UnseenError(f"{path} has a line that nri-gpu does not understand: {error}") from error
    except OSError as error:
        raise UnseenError(f"{path} cannot be read: {cause_of(error)}", error) from error


def _cgroups_of_thread(thread: str | Path) -> Mapping[str, str]:
    return dict(chain.from_iterable(parsed(f"{thread}/cgroup", _paths)))


def _paths(line: str) -> list[tuple[str, str]]:
    """Return controllers with the path of a line of /proc/PID/cgroup; cgroup v2's is unnamed. Raises: ValueError."""
    _, controllers, path = line.split(":", 2)
    return [(controller, path) for controller in controllers.split(",")]


def _own_cgroup(controller: str, path: str, container_id: ContainerId) -> Cgroup | None:
    """Return the cgroup at the part of a path named after the container, or None if no part is, or none below here."""
    parts = path.split("/")
    end = next((at for at, part in enumerate(parts, 1) if container_id in _ids(part)), None)
    return Cgroup(controller, "/".join(parts[:end])) if end and ".." not in parts else None


def _ids(name: str) -> Iterator[str]:
    """Yield what may be the id of a container in the name of its cgroup.

    The name is `ID` by the driver cgroupfs, and `cri-containerd-ID.scope` by systemd, with the runtime's own word; an
    id may have hyphens. `crio-conmon-ID` is of CRI-O's monitor.
    """
    name = name.removesuffix(".scope")
    yield name
    dash = name.find("-")
    while dash >= 0:
        if not name.endswith("-conmon", 0, dash):
            yield name[dash + 1 :]
        dash = name.find("-", dash + 1)


def _named_below(top: str, container_ids: Set[ContainerId]) -> Iterator[tuple[ContainerId, str]]:
    """Yield the cgroups that are named after these containers, and lie below no other: whose each is, and its path.

    Raises: OSError.
    """
    left, met, again = [top], {top}, set[str]()
    while left or again:
        if not left:
            left, again = list(again), set()
        folder = left.pop()
        try:
            with os.scandir(folder) as entries:
                below = [each for each in entries if each.is_dir(follow_symlinks=False) and each.path not in met]
        except OSError as error:
            if error.errno in _GONE and folder != top:  # or renamed, as v1 allows: its parent tells
                again.add(os.path.dirname(folder))  # noqa: PTH120 - a walk meets a hundred thousand of them
            elif error.errno != errno.ENAMETOOLONG:  # no runtime made that cgroup
                raise
            continue
        met.update(each.path for each in below)
        for each in below:
            ids = (id_ for id_ in _ids(each.name) if id_ in container_ids)
            if container_id := next(ids, None):
                yield ContainerId(container_id), each.path.removeprefix(top)
            else:
                left.append(each.path)


def _pids(folders: Iterable[str]) -> Iterator[int]:
    """Yield PIDs of cgroups, and 0 for a process without a PID here. Raises: OSError."""
    for folder in folders:
        with _unless_gone():
            yield from map(int, Path(folder, "cgroup.procs").read_text().split())


def _below(top: Path, most: int | None = None) -> Iterator[str]:
    """Yield the folder of a cgroup and those of all below it, or at least `most` of them if there are more.

    Raises: OSError, such as for a path that is too long.
    """
    left = [str(top)]
    while left:
        folder = left.pop()
        yield folder
        left += [each.path for each in islice(_children(folder), most)]


def _children(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the cgroups in a cgroup, none if it is gone. Raises: OSError."""
    with _unless_gone(), os.scandir(folder) as entries:
        yield from (each for each in entries if each.is_dir(follow_symlinks=False))


@contextmanager
def _unless_gone() -> Iterator[None]:
    """Leave out a cgroup that was removed meanwhile. Raises: OSError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _plain(path: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)
