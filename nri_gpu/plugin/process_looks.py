"""The eyes of `ledger/processes.py`: pidfds, inotify, one timer, and one walk of all cgroups, in a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.container import ContainerId, FirstProcess
from nri_gpu.domain.errors import fault_of
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.events import LedgerEvent
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.ledger.processes import (
    WALK_LATE_S,
    WARNED_AFTER_S,
    CgroupChanged,
    ContainerProcesses,
    Exited,
    LookedAt,
    Means,
    NotWatched,
    Observation,
    Told,
    Walked,
)
from nri_gpu.system.cgroups import ContainerCgroups
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.tasks import LogOnce

if TYPE_CHECKING:
    from nri_gpu.system.folder_watch import FolderWatch

PIDS_SHOWN: Final = 8


class Lost(Struct, frozen=True):
    """A lost container."""

    container_id: ContainerId
    pod: str  # namespace/name
    container: str
    uuids: tuple[GpuUuid, ...]
    since: float  # monotonic, seconds
    cgroup: str  # path; empty if it is not seen
    pids: tuple[int, ...]
    sought: bool = False  # the list lacks it, and its cgroup is being looked for


class ProcessLooks:
    """The look at containers' processes, each time that the ledger changes or something is seen.

    apply: takes what the ledger has to hear. tells: as `Means` has it. clock: the ledger's. later: run something once
    the reply is on its way. look_at_gpus: asks for a look at released GPUs; None where nobody can look.
    """

    def __init__(
        self,
        state: NodeState,
        cgroups: ContainerCgroups,
        apply: Callable[[LedgerEvent], None],
        tells: Callable[[], bool],
        clock: Callable[[], float],
        later: Callable[[Callable[[], None]], object],
        look_at_gpus: Callable[[], None] | None = None,
    ) -> None:
        self.table = ContainerProcesses()
        self._state = state
        self._cgroups = cgroups
        self._apply = apply
        self._tells = tells
        self._clock = clock
        self._later = later
        self._comes = False  # a look, for what the runtime told
        self._look_at_gpus = look_at_gpus
        self._pidfds: dict[ContainerId, tuple[int, int]] = {}  # with the PID of each
        self._lost: frozenset[ContainerId] = frozenset()  # whose cgroups are watched
        self._warned: frozenset[ContainerId] = frozenset()
        self._warned_unstarted: frozenset[ContainerId] = frozenset()
        self._told = False  # changes of all their cgroups are told
        self._watch: FolderWatch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pidfd_faults, self._walk_faults = LogOnce(clock=clock), LogOnce(clock=clock)
        state.then(self._turn, Changed.LEDGER)

    def saw(self, observation: Observation) -> None:
        """Take what the runtime told. The look that follows comes once the reply is on its way."""
        self._take(self._clock(), observation)
        if not (self._comes or isinstance(observation, Told)):  # what is watched in vain does no harm until the next
            self._comes = True
            self._later(self._turn_if_none_came)

    def _turn_if_none_came(self) -> None:
        if self._comes:
            self._turn()

    def look(self) -> None:
        """Look at all lost containers, and at what else is due."""
        now = self._clock()
        self._take(now, CgroupChanged())
        self._look(now)

    def described(self) -> tuple[Lost, ...]:
        """Describe the containers that are lost now, with the processes that they have."""
        ledger = self._state.ledger
        lost = (self._describe(ledger, each, since) for each, since in ledger.lost.items())
        # A monitor's container holds no GPU.
        return tuple(each for each in lost if each.uuids or each.container_id not in ledger.external)

    @property
    def _means(self) -> Means:
        grace_s, gpus = self._state.settings.ledger.created_grace_s, self._look_at_gpus is not None
        return Means(grace_s, self._tells(), self._cgroups.seen, self._told, gpus)

    def _seen(self, observation: Observation) -> None:
        self._take(self._clock(), observation)
        self._turn()

    def _take(self, now: float, observation: Observation) -> None:
        self._tell(self.table.saw(now, observation, self._state.ledger, self._means))

    def _tell(self, events: Iterable[LedgerEvent]) -> None:
        for event in events:
            self._apply(event)

    def _turn(self, at: float = 0.0) -> None:
        """Look, and wait for what is next. at: a time that has come, by the ledger's clock."""
        self._comes = False
        now = max(at, self._clock())
        means = self._look(now)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if (due := self.table.due(now, self._state.ledger, means)) is not None:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._turn, due)

    def _look(self, now: float) -> Means:
        self._tell(self.table.overdue(now, self._state.ledger))
        self._watch_cgroups()
        means = self._means
        found = self.table.next(now, self._state.ledger, means)
        self._watch_exits(found.exits)
        if found.gpus and self._look_at_gpus:
            self._look_at_gpus()
        if found.walk:
            self._walk(found.walk)
        if found.walk_is_late:
            self._note_walk(f"it has not finished within {WALK_LATE_S:.0f} s")
        if found.look_at:
            processes = self._state.ledger.processes
            empty = frozenset(each for each in found.look_at if not self._cgroups.lives(processes[each]))
            self._take(now, LookedAt(found.look_at, empty))
            self._tell(self.table.overdue(now, self._state.ledger))  # fewer GPUs may be stuck
        self._warn(now)
        return means

    # --- pidfds ---

    def _watch_exits(self, exits: Mapping[ContainerId, int]) -> None:
        for id_ in [each for each, (pid, _) in self._pidfds.items() if exits.get(each) != pid]:
            self._close(id_)
        for id_ in exits.keys() - self._pidfds.keys():
            try:
                fd = os.pidfd_open(exits[id_])
            except ProcessLookupError:
                self.saw(Exited(id_, exits[id_]))
            except (OSError, OverflowError) as error:
                self._pidfd_faults.note("process of a container cannot be watched", fault_of(error), container_id=id_)
                self.saw(NotWatched(id_))
            else:
                self._pidfds[id_] = exits[id_], fd
                asyncio.get_running_loop().add_reader(fd, self._exited, id_)

    def _exited(self, container_id: ContainerId) -> None:
        self._seen(Exited(container_id, self._close(container_id)))

    def _close(self, container_id: ContainerId) -> int:
        """Watch a process no more. Return its PID."""
        pid, fd = self._pidfds.pop(container_id)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        return pid

    # --- inotify ---

    def _watch_cgroups(self) -> None:
        """Watch the cgroups that tell of the end of their last process."""
        ledger = self._state.ledger
        lost = frozenset(ledger.lost.keys() & ledger.processes.keys())
        if lost == self._lost:
            return
        known, self._lost = self._lost, lost
        if not lost - known:
            if not lost:
                self._end_watch()
            return
        processes = [ledger.processes[each] for each in lost]
        told = [each for each in processes if self._cgroups.tells(each)]
        self._end_watch()
        files = chain.from_iterable(map(self._cgroups.events_files, told))
        self._told = len(told) == len(processes) and self._watches(files)

    def _watches(self, files: Iterable[Path]) -> bool:
        from nri_gpu.system.folder_watch import IN_MODIFY, FolderWatch  # brings ctypes: only where a container is lost

        self._watch = FolderWatch(lambda: self._seen(CgroupChanged()), IN_MODIFY)
        try:
            return self._watch.open(files)
        except OSError:  # a node has few instances (fs.inotify.max_user_instances), and other programs may use them all
            return False

    def _end_watch(self) -> None:
        if self._watch:
            self._watch.close()
            self._watch = None

    # --- the walk ---

    def _walk(self, container_ids: frozenset[ContainerId]) -> None:
        """Look for containers, in a thread that an end of this process does not wait for: by name if not known."""
        ledger, loop = self._state.ledger, asyncio.get_running_loop()
        known = self.table.listed | ledger.entries.keys() | ledger.live.keys()
        processes = {id_: each for id_ in container_ids if (each := ledger.processes.get(id_))}

        def walk() -> None:
            found = dict[ContainerId, FirstProcess]()
            try:
                found |= {id_: each for id_, each in processes.items() if self._cgroups.lives(each)}
                found |= self._cgroups.named(container_ids - found.keys(), known)
            except Exception as error:
                fault = str(error) or repr(error)
            else:
                fault = ""
            with suppress(RuntimeError):  # the loop is closed: this process ends
                loop.call_soon_threadsafe(self._walked, found, fault)

        try:
            threading.Thread(target=walk, name="nri-gpu-cgroups", daemon=True).start()
        except RuntimeError as error:  # such as for TasksMax=
            loop.call_soon(self._walked, {}, str(error))

    def _walked(self, found: Mapping[ContainerId, FirstProcess], fault: str) -> None:
        self._note_walk(fault)
        self._seen(Walked(found, whole=not fault))

    def _note_walk(self, fault: str) -> None:
        self._walk_faults.warning(
            "cgroups not walked: containers that the runtime does not list keep their GPUs", fault
        )

    # --- what is told of them ---

    def _describe(self, ledger: Ledger, container_id: ContainerId, since: float) -> Lost:
        process, entry = ledger.processes.get(container_id), ledger.entries.get(container_id)
        path = process.cgroup.path if process and process.cgroup else ""
        pids = self._cgroups.pids(process, PIDS_SHOWN) if process else ()
        if entry and entry.lost:
            pod, name, uuids = entry.grant.pod, entry.grant.container_name, entry.grant.held
        else:
            live, opened = ledger.live[container_id], ledger.external.get(container_id)
            pod, name, uuids = live.pod, live.container, tuple(opened.held) if opened else ()
        return Lost(container_id, pod, name, uuids, since, path, pids, sought=process is None)

    def _warn(self, now: float) -> None:
        ledger = self._state.ledger
        lost = {id_ for id_, since in ledger.lost.items() if now - since >= WARNED_AFTER_S and id_ in ledger.processes}
        self._warned &= lost
        if lost - self._warned:
            new = [each for each in self.described() if each.container_id in lost - self._warned]
            for each in new:
                _warn_of(each)
            self._warned |= {each.container_id for each in new}
        if not (self._tells() or self._cgroups.seen):
            self._warn_of_unstarted(now, ledger)

    def _warn_of_unstarted(self, now: float, ledger: Ledger) -> None:
        overdue = ledger.overdue(now, self._state.settings.ledger.created_grace_s)
        grants = {id_: ledger.entries[id_].grant for id_ in overdue if ledger.entries[id_].grant.held}
        for container_id in grants.keys() - self._warned_unstarted:
            grant = grants[container_id]
            bound = logger.bind(namespace=grant.namespace, pod_name=grant.pod_name, container_name=grant.container_name)
            bound.bind(container_id=container_id, gpu_uuid=",".join(grant.held)).warning(
                "container never started and its cgroup is not seen: it keeps its GPUs until it is removed"
            )
        self._warned_unstarted = frozenset(grants)


def _warn_of(lost: Lost) -> None:
    namespace, _, pod_name = lost.pod.partition("/")
    bound = logger.bind(namespace=namespace, pod_name=pod_name, container_name=lost.container)
    bound = bound.bind(container_id=lost.container_id, gpu_uuid=",".join(lost.uuids), cgroup=lost.cgroup)
    bound.bind(pids=",".join(map(str, lost.pids))).warning(
        "container has ended for the runtime, but its processes still hold its GPUs"
    )
