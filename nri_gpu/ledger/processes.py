"""When a GPU becomes free: what is seen of processes, and what the ledger hears of it. Pure: time is an argument.

    container or GPU   holds until                              what tells                            heard
    -----------------  ---------------------------------------  ------------------------------------  ------------
    running            its first process ends                   the runtime
                       and the runtime is silent TOLD_WITHIN_S  a pidfd                               Stopped
    starting           it was to be stopped STARTS_S ago        time                                  Ticked
    lost               no process of it is left                 inotify, or a look each PAUSE_S       Gone
    unsought           no cgroup of its name has a process      a whole walk begun after the list     Sought
    unstarted          the same, and its grace is over          a walk each WALK_PAUSE_S              NeverStarted
    unlisted, overdue  no process of it is left                 a look, as its grace is over          NeverStarted
                       one is left: then it is lost             the same                              Removed
    GPU, releasing     no process is on it, or its grace ends   NVML, more and more rarely; time      Ticked

Unsought: a list lacks it, and no walk that began after that list has looked for its cgroup. Unstarted: created, on a
runtime that heeds no refused start. Unlisted: only the journal has it. What cannot be seen frees no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import TOLD_WITHIN_S, ContainerId, FirstProcess
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.entries import STARTS_S
from nri_gpu.ledger.events import (
    Gone,
    HeldForLong,
    LedgerEvent,
    NeverStarted,
    Removed,
    Sought,
    Stopped,
    Ticked,
)
from nri_gpu.ledger.ledger import Entry, GrantPhase, Lapse, Ledger

WATCHED_MAX: Final = 512  # pidfds, of the 1,024 descriptors that a process has by default
PAUSE_S: Final = 0.1  # between looks at lost containers, where nothing tells
WALK_PAUSE_S: Final = 1.0  # between walks, and before the first one for an unstarted container
WALK_LATE_S: Final = 10.0  # after which a walk that goes on is reported
WARNED_AFTER_S: Final = 1.0  # processes that are being killed live on for a moment
STUCK_AFTER_S: Final = 60.0  # from then on no pod is sent to the GPUs of a lost container
FIRST_PAUSE_S: Final = 0.1  # between looks at released GPUs
LONGEST_PAUSE_S: Final = 2.0  # such a look is some calls into the driver, and wakes GPUs that sleep
_LATE_S: Final = 0.001  # what is over after a time is not over at that time


class Means(Struct, frozen=True):
    """The ways to see processes, in the connection of now."""

    grace_s: float  # the policy's `created_grace_s`
    tells: bool = True  # the runtime tells of each start, and heeds our refusal of one
    seen: bool = True  # cgroups can be seen
    told: bool = False  # changes of the cgroups of all lost containers are told
    looks_at_gpus: bool = False  # somebody can be asked to look at released GPUs


class Began(Struct, frozen=True):
    """A container is there. pid: of its process, in our PID namespace; 0 where it is not known."""

    container_id: ContainerId
    pid: int


class ListedPids(Struct, frozen=True):
    """The runtime made a list. pids: of containers that run and hold something; 0 where the list has no PID."""

    container_ids: frozenset[ContainerId]  # all that it has
    pids: Mapping[ContainerId, int]


class Told(Struct, frozen=True):
    """The runtime told of a container's end, or of its beginning."""

    container_id: ContainerId


class Exited(Struct, frozen=True):
    """A process has ended that was watched. Its container may have another by now."""

    container_id: ContainerId
    pid: int


class NotWatched(Struct, frozen=True):
    """The kernel refuses to watch a process."""

    container_id: ContainerId


class CgroupChanged(Struct, frozen=True):
    """The cgroup of a lost container may be empty now."""


class LookedAt(Struct, frozen=True):
    """Known processes were looked at. empty: containers that have none left, of `container_ids`."""

    container_ids: frozenset[ContainerId]
    empty: frozenset[ContainerId]


class Walked(Struct, frozen=True):
    """The walk is over. found: containers with a process. whole: it looked into every cgroup of the host."""

    found: Mapping[ContainerId, FirstProcess] = {}
    whole: bool = True


Observation = Began | ListedPids | Told | Exited | NotWatched | CgroupChanged | LookedAt | Walked


class Next(Struct, frozen=True):
    """The next things to look at."""

    exits: Mapping[ContainerId, int]  # processes whose exits to wait for, by PID
    look_at: frozenset[ContainerId]  # containers whose known processes to look at now
    walk: frozenset[ContainerId]  # containers to look for in all cgroups now
    walk_is_late: bool  # the walk that was begun goes on for long
    gpus: bool  # whether to look at released GPUs now


class ContainerProcesses:
    """The processes of containers, as far as they are known beside the ledger."""

    def __init__(self) -> None:
        self.listed: frozenset[ContainerId] = frozenset()  # in the runtime's newest list
        self.unsure: set[ContainerId] = set()  # running by that list, and may be over: another list tells
        self._without_pid: set[ContainerId] = set()  # in that list, and not seen before
        self._exits: dict[ContainerId, int] = {}  # the processes to watch
        self._over: dict[ContainerId, float] = {}  # whose process has ended, and when the ledger is to hear of it
        self._lost: frozenset[ContainerId] = frozenset()
        self._look_due = 0.0
        self._walk: tuple[float, frozenset[ContainerId]] | None = None  # that goes on: when it began, for whom
        self._walk_due = 0.0
        self._gpus_looked, self._gpus_due = -math.inf, math.inf

    def saw(self, now: float, observation: Observation, ledger: Ledger, means: Means) -> tuple[LedgerEvent, ...]:
        """Take what was seen. Return what the ledger has to hear of it."""
        match observation:
            case Began(container_id, pid):
                self._began(now, container_id, pid)
            case ListedPids():
                self._take_list(observation)
            case Told(container_id):
                self._forget(container_id)
            case Exited(container_id, pid) if self._exits.get(container_id) == pid:
                self._exited(now, container_id)
            case NotWatched(container_id):
                self._exits.pop(container_id, None)
            case CgroupChanged():
                self._look_due = now
            case LookedAt():
                return tuple(self._looked_at(now, observation, ledger, means))
            case Walked():
                return tuple(self._walked(now, observation, ledger, means))
            case _:
                pass  # the exit of a process that nobody waits for any more
        return ()

    def overdue(self, now: float, ledger: Ledger) -> tuple[LedgerEvent, ...]:
        """Return what the ledger has to hear since time went by."""
        ended = [id_ for id_, at in self._over.items() if now >= at]
        self._over |= dict.fromkeys(ended, math.inf)
        events: list[LedgerEvent] = [Stopped(now, each) for each in ended]
        if now >= self._gpus_due or any(now - since >= STARTS_S for since in _stopping(ledger)):
            self._gpus_due = math.inf
            events.append(Ticked(now))
        stuck = (_uuids(ledger, id_) for id_, since in ledger.lost.items() if now - since >= STUCK_AFTER_S)
        if (uuids := frozenset(chain.from_iterable(stuck))) != ledger.stuck:
            events.append(HeldForLong(now, uuids))
        return tuple(events)

    def next(self, now: float, ledger: Ledger, means: Means) -> Next:
        """Return what to look at now."""
        for each in [id_ for id_ in self._exits if id_ not in ledger.entries and id_ not in ledger.live]:
            del self._exits[each]
        late = self._walk is not None and now - self._walk[0] >= WALK_LATE_S
        gpus = means.looks_at_gpus and self._next_gpus(now, ledger)
        return Next(self._exits, self._next_looks(now, ledger, means), self._next_walk(now, ledger, means), late, gpus)

    def due(self, now: float, ledger: Ledger, means: Means) -> float | None:
        """Return when to ask again if nothing is seen before, on the ledger's clock; None: no sooner than that."""
        due = min((each for each in self._dues(ledger, means) if each > now), default=math.inf)
        return due if due < math.inf else None

    def _dues(self, ledger: Ledger, means: Means) -> Iterator[float]:
        """Yield all times at which something is to be looked at or over."""
        yield from self._over.values()
        yield from (since + STARTS_S + _LATE_S for since in _stopping(ledger))
        yield from (since + after_s for since in ledger.lost.values() for after_s in (WARNED_AFTER_S, STUCK_AFTER_S))
        if self._lost and not means.told:
            yield self._look_due
        yield from (deadline + _LATE_S for deadline in _unlisted(ledger, means).values())
        if self._walk:
            yield self._walk[0] + WALK_LATE_S
        elif means.seen:
            created = (each.since + WALK_PAUSE_S for each in _unstarted(ledger, means).values())
            yield from (max(self._walk_due, each) for each in (*created, *ledger.unsought.values()))
        if ledger.releasing:
            yield self._gpus_due

    # --- exits, of running containers ---

    def _began(self, now: float, container_id: ContainerId, pid: int) -> None:
        """Watch a process. containerd lists a container that has just ended as running, without a PID."""
        if pid:
            self._forget(container_id)
            if len(self._exits) < WATCHED_MAX:
                self._exits[container_id] = pid
        elif container_id in self._over:
            self._exited(now, container_id)

    def _exited(self, now: float, container_id: ContainerId) -> None:
        self._forget(container_id)
        self._over[container_id] = now + TOLD_WITHIN_S

    def _forget(self, container_id: ContainerId) -> None:
        self.unsure.discard(container_id)
        self._exits.pop(container_id, None)
        self._over.pop(container_id, None)

    def _take_list(self, new: ListedPids) -> None:
        """Take a list. A container without a PID, whose process we never saw, has just ended, or its shim hangs.

        So it is unsure, but not again where the next list has no PID of it either. A walk that goes on tells of nobody
        whom this list lacks.
        """
        known = self._exits.keys() | self._over.keys()
        for container_id in known - new.pids.keys():
            self._forget(container_id)
        without_pid = {container_id for container_id, pid in new.pids.items() if not pid} - known
        self.listed, self.unsure, self._without_pid = new.container_ids, without_pid - self._without_pid, without_pid
        if self._walk:
            self._walk = self._walk[0], frozenset()

    # --- looks, at the known processes of lost containers, and of unlisted ones that are overdue ---

    def _next_looks(self, now: float, ledger: Ledger, means: Means) -> frozenset[ContainerId]:
        before, self._lost = self._lost, frozenset(ledger.lost.keys() & ledger.processes.keys())
        lost = self._lost if self._lost - before or now >= self._look_due else frozenset()
        return lost | _overdue(now, ledger, means)

    def _looked_at(self, now: float, looked: LookedAt, ledger: Ledger, means: Means) -> Iterator[LedgerEvent]:
        self._look_due = now + PAUSE_S
        left, unlisted = looked.container_ids - looked.empty, _overdue(now, ledger, means)
        lost_empty, unlisted_empty = looked.empty & ledger.lost.keys(), looked.empty & unlisted
        for event, ids in ((Gone, lost_empty), (NeverStarted, unlisted_empty), (Removed, left & unlisted)):
            if ids:
                yield event(now, tuple(sorted(ids)))

    # --- the walk, for unsought and unstarted containers ---

    def _next_walk(self, now: float, ledger: Ledger, means: Means) -> frozenset[ContainerId]:
        if self._walk or not means.seen or now < self._walk_due:
            return frozenset()
        created = (id_ for id_, each in _unstarted(ledger, means).items() if now >= each.since + WALK_PAUSE_S)
        if sought := frozenset(chain(ledger.unsought, created)):
            self._walk = now, sought
        return sought

    def _walked(self, now: float, walked: Walked, ledger: Ledger, means: Means) -> Iterator[LedgerEvent]:
        assert self._walk
        (began, sought), self._walk = self._walk, None
        self._walk_due = now + WALK_PAUSE_S
        still = sought & (ledger.unsought.keys() | _unstarted(ledger, means).keys())
        there = {id_: each for id_, each in walked.found.items() if id_ in still}
        unsought = sought & ledger.unsought.keys() if walked.whole else frozenset()
        if unsought or there:
            yield Sought(now, began, unsought, there)
        absent = still - there.keys() if walked.whole else frozenset()
        if over := absent & _unstarted(ledger, means).keys() & ledger.overdue(began, means.grace_s):
            yield NeverStarted(now, tuple(sorted(over)))

    # --- released GPUs ---

    def _next_gpus(self, now: float, ledger: Ledger) -> bool:
        since = max((each.since for each in ledger.releasing.values()), default=None)
        if since is None or (since <= self._gpus_looked and now < self._gpus_due < math.inf):
            return False
        self._gpus_looked, self._gpus_due = now, now + min(now - since + FIRST_PAUSE_S, LONGEST_PAUSE_S)
        return True


def _stopping(ledger: Ledger) -> Iterator[float]:
    """Yield since when containers are to be stopped during their starts, which may go on."""
    for id_, since in ledger.starting.items():
        if since is not None and ledger.entries[id_].phase is GrantPhase.RUNNING:
            yield since


def _uuids(ledger: Ledger, container_id: ContainerId) -> Iterable[GpuUuid]:
    entry, opened = ledger.entries.get(container_id), ledger.external.get(container_id)
    return entry.grant.held if entry and entry.lost else opened.held if opened else ()


def _unlisted(ledger: Ledger, means: Means) -> Mapping[ContainerId, float]:
    """Map containers that only the journal has, and that a walk found, to when they should have started by."""
    if not means.tells:
        return {}
    found = (id_ for id_, each in ledger.entries.items() if each.remembered and id_ in ledger.processes)
    return {id_: ledger.entries[id_].deadline(means.grace_s) for id_ in found}


def _overdue(now: float, ledger: Ledger, means: Means) -> frozenset[ContainerId]:
    return frozenset(id_ for id_, deadline in _unlisted(ledger, means).items() if now > deadline)


def _unstarted(ledger: Ledger, means: Means) -> Mapping[ContainerId, Entry]:
    """Return the containers that were created and hold a GPU, and not for good, where no refused start is heeded."""
    if means.tells:
        return {}
    created = {id_: each for id_, each in ledger.entries.items() if each.phase is GrantPhase.CREATED}
    return {id_: each for id_, each in created.items() if each.grant.held and each.until is not Lapse.NEVER}
