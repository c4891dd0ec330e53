"""When a GPU becomes free: what is seen of processes, and what the ledger hears of it. Pure: time is an argument.

    state       holds its GPUs until                       what tells
    RUNNING     its first process ends                     the runtime; a pidfd where the runtime says nothing
    ENDED       the runtime had TOLD_WITHIN_S to tell      time
    STOPPING    its start had STARTS_S to go on            PostStartContainer; time
    LOST        no process of it is left                   its cgroup, by inotify, or a look each PAUSE_S
    UNSEEN      no cgroup of its name has a process        a whole walk that began after the list which lacks it
    UNSTARTED   the same, and its grace is over            a walk each second, on runtimes that heed no refused start
    UNLISTED    only the journal has it, and it is overdue    a look at the cgroup that a walk found
    RELEASING   no process is on its GPU                   NVML, more and more rarely; time

A sight that a state has no row for changes nothing: what cannot be seen frees no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import StrEnum
from itertools import chain
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import ContainerId, FirstProcess
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.ledger.entries import STARTS_S
from nri_gpu.ledger.events import (
    Gone,
    HeldForLong,
    LedgerEvent,
    NeverStarted,
    ProcessesFound,
    Removed,
    Sought,
    Stopped,
    Ticked,
)
from nri_gpu.ledger.ledger import Entry, GrantPhase, Lapse, Ledger

TOLD_WITHIN_S: Final = 1.0  # how long to wait for the runtime's own exit event, which takes precedence
WATCHED_MAX: Final = 512  # pidfds, of the 1,024 descriptors that a process has by default
PAUSE_S: Final = 0.1  # between looks at lost containers, where nothing tells
WALK_PAUSE_S: Final = 1.0  # between walks, for unstarted containers or after one that failed
WALK_LATE_S: Final = 10.0  # after which a walk that goes on is reported
WARNED_AFTER_S: Final = 1.0  # processes that are being killed live on for a moment
STUCK_AFTER_S: Final = 60.0  # from then on no pod is sent to the GPUs of a lost container
FIRST_PAUSE_S: Final = 0.1  # between looks at released GPUs
LONGEST_PAUSE_S: Final = 2.0  # such a look is some calls into the driver, and wakes GPUs that sleep
_LATE_S: Final = 0.001  # a timer comes no earlier than what it is for


class State(StrEnum):
    """The state of a container whose end gives a GPU back."""

    ENDED = "ended"
    STOPPING = "stopping"
    LOST = "lost"
    UNSTARTED = "unstarted"
    UNLISTED = "unlisted"
    RELEASING = "releasing"


class Sight(StrEnum):
    """Something that was seen."""

    EMPTY = "no process is left"
    OCCUPIED = "a process is left"
    DUE = "its time has come"


TABLE: Final[Mapping[tuple[State, Sight], Callable[[float, tuple[ContainerId, ...]], LedgerEvent]]] = {
    (State.ENDED, Sight.DUE): lambda at, ids: Stopped(at, ids[0]),
    (State.STOPPING, Sight.DUE): lambda at, _: Ticked(at),
    (State.RELEASING, Sight.DUE): lambda at, _: Ticked(at),
    (State.LOST, Sight.EMPTY): Gone,
    (State.UNSTARTED, Sight.EMPTY): NeverStarted,
    (State.UNLISTED, Sight.EMPTY): NeverStarted,
    (State.UNLISTED, Sight.OCCUPIED): Removed,
}


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
    """The runtime lists these as running. pids: of their processes; 0 where the list has no PID."""

    pids: Mapping[ContainerId, int]


class Told(Struct, frozen=True):
    """The runtime told of a container's end, or of its beginning."""

    container_id: ContainerId


class Exited(Struct, frozen=True):
    """A process has ended that was watched."""

    container_id: ContainerId


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
    walk: frozenset[ContainerId]  # containers whose cgroups to look for now
    walk_is_late: bool  # the walk that was begun goes on for long
    gpus: bool  # whether to look at released GPUs now


class ContainerProcesses:
    """What is known of the processes of containers beside the ledger."""

    def __init__(self) -> None:
        self.unsure: set[ContainerId] = set()  # running by the last list, and may be over: another list tells
        self._exits: dict[ContainerId, int] = {}  # of those to watch, the PIDs
        self._over: set[ContainerId] = set()  # whose process has ended, told or not
        self._ended: dict[ContainerId, float] = {}  # of these the runtime says nothing, and since when
        self._without_pid: set[ContainerId] = set()  # in the last list, and not seen before
        self._lost: frozenset[ContainerId] = frozenset()
        self._look_due = 0.0
        self._walk: tuple[float, frozenset[ContainerId]] | None = None  # that goes on: when it began, for whom
        self._walk_due = 0.0
        self._unstarted_due: float | None = None
        self._absent: frozenset[ContainerId] = frozenset()  # unstarted, and to be looked for
        self._releasing: frozenset[tuple[GpuUuid, float]] = frozenset()  # and since when
        self._gpus_due: float | None = None
        self._gpu_looks = 0

    def saw(self, now: float, observation: Observation, ledger: Ledger, means: Means) -> tuple[LedgerEvent, ...]:
        """Take what was seen. Return what the ledger has to hear of it."""
        match observation:
            case Began(container_id, pid):
                self._began(now, container_id, pid)
            case ListedPids(pids):
                self._listed(pids)
            case Told(container_id):
                self._forget(container_id)
            case Exited(container_id):
                self._exited(now, container_id)
            case NotWatched(container_id):
                self._exits.pop(container_id, None)
            case CgroupChanged():
                self._look_due = now
            case LookedAt():
                return tuple(self._looked_at(now, observation, ledger, means))
            case Walked():
                return tuple(self._walked(now, observation, ledger, means))
        return ()

    def knows(self, container_id: ContainerId) -> bool:
        """Return whether there is something to forget once the runtime tells of a container."""
        return container_id in self._exits or container_id in self._over or container_id in self.unsure

    def overdue(self, now: float, ledger: Ledger) -> tuple[LedgerEvent, ...]:
        """Return what the ledger has to hear since time went by."""
        ended = [id_ for id_, at in self._ended.items() if now >= at + TOLD_WITHIN_S]
        for each in ended:
            del self._ended[each]
        events = [TABLE[State.ENDED, Sight.DUE](now, (each,)) for each in ended]
        if any(now - since >= STARTS_S for since in _stopping(ledger)):
            events.append(TABLE[State.STOPPING, Sight.DUE](now, ()))
        if self._gpus_due is not None and now >= self._gpus_due:
            self._gpus_due = None
            events.append(TABLE[State.RELEASING, Sight.DUE](now, ()))
        stuck = (_uuids(ledger, id_) for id_, since in ledger.lost.items() if now - since >= STUCK_AFTER_S)
        if (uuids := frozenset(chain.from_iterable(stuck))) != ledger.stuck:
            events.append(HeldForLong(now, uuids))
        return tuple(events)

    def next(self, now: float, ledger: Ledger, means: Means) -> Next:
        """Return what to look at now, and when to ask again."""
        look_at = self._looks(now, ledger, means)
        walk = self._next_walk(now, ledger, means)
        gpus = means.looks_at_gpus and self._next_gpus(now, ledger)
        holders = ledger.entries.keys() | ledger.live.keys()
        exits = {id_: pid for id_, pid in self._exits.items() if id_ in holders}
        late = self._walk is not None and now - self._walk[0] >= WALK_LATE_S
        return Next(exits, look_at, walk, late, gpus)

    def due(self, now: float, ledger: Ledger, means: Means) -> float | None:
        """Return when to ask again if nothing is seen before, on the ledger's clock; None: no sooner than that."""
        return min((each for each in self._dues(ledger, means) if each > now), default=None)

    # --- exits: of RUNNING containers, which the runtime may not tell ---

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
        self._over.add(container_id)
        self._ended[container_id] = now

    def _forget(self, container_id: ContainerId) -> None:
        self._over.discard(container_id)
        self.unsure.discard(container_id)
        self._exits.pop(container_id, None)
        self._ended.pop(container_id, None)

    def _listed(self, pids: Mapping[ContainerId, int]) -> None:
        """Take a list. A container without a PID, whose process we never saw, has just ended, or its shim hangs.

        So it is unsure, but not again where the next list has no PID of it either.
        """
        known = self._exits.keys() | self._over
        without_pid = {container_id for container_id, pid in pids.items() if not pid} - known
        for container_id in known - pids.keys():
            self._forget(container_id)
        self.unsure = without_pid - self._without_pid
        self._without_pid = without_pid

    # --- looks: at the known processes of LOST, UNLISTED and UNSTARTED containers ---

    def _looks(self, now: float, ledger: Ledger, means: Means) -> frozenset[ContainerId]:
        lost = ledger.lost.keys() & ledger.processes.keys()
        new, self._lost = lost - self._lost, frozenset(lost)
        look_at = set(lost) if new or now >= self._look_due else set()
        look_at |= self._unlisted(now, ledger, means)
        created = _unstarted(ledger, means)
        if created and self._unstarted_due is not None and now >= self._unstarted_due and means.seen:
            look_at |= created.keys() & ledger.processes.keys()
            self._absent = frozenset(created.keys() - ledger.processes.keys())
        if not created:
            self._unstarted_due = None
        elif self._unstarted_due is None or now >= self._unstarted_due:
            self._unstarted_due = now + WALK_PAUSE_S
        return frozenset(look_at)

    def _unlisted(self, now: float, ledger: Ledger, means: Means) -> Set[ContainerId]:
        return ledger.overdue(now, means.grace_s) & ledger.processes.keys() if means.tells else frozenset()

    def _looked_at(self, now: float, looked: LookedAt, ledger: Ledger, means: Means) -> Iterator[LedgerEvent]:
        self._look_due = now + PAUSE_S
        occupied = looked.container_ids - looked.empty
        unlisted = self._unlisted(now, ledger, means)
        self._absent |= looked.empty & _unstarted(ledger, means).keys()
        for state, ids in ((State.LOST, ledger.lost.keys()), (State.UNLISTED, unlisted)):
            for sight, those in ((Sight.EMPTY, looked.empty), (Sight.OCCUPIED, occupied)):
                if (event := TABLE.get((state, sight))) and (met := tuple(sorted(those & ids))):
                    yield event(now, met)

    # --- the walk: for UNSEEN and UNSTARTED containers ---

    def _next_walk(self, now: float, ledger: Ledger, means: Means) -> frozenset[ContainerId]:
        sought = frozenset(ledger.unsought) | self._absent
        if self._walk or not sought or not means.seen or now < self._walk_due:
            return frozenset()
        self._walk, self._absent = (now, sought), frozenset()
        return sought

    def _walked(self, now: float, walked: Walked, ledger: Ledger, means: Means) -> Iterator[LedgerEvent]:
        assert self._walk
        (began, sought), self._walk = self._walk, None
        self._walk_due = began if walked.whole else now + WALK_PAUSE_S
        there = {id_: each for id_, each in walked.found.items() if id_ in ledger.entries or id_ in ledger.live}
        unseen = sought & ledger.unsought.keys()
        if unseen:
            yield Sought(now, began, unseen if walked.whole else unseen & there.keys(), there)
        elif there:
            yield ProcessesFound(now, there)
        absent = (sought - there.keys()) & _unstarted(ledger, means).keys() if walked.whole else frozenset()
        if over := tuple(sorted(absent & ledger.overdue(began, means.grace_s))):
            yield TABLE[State.UNSTARTED, Sight.EMPTY](now, over)

    # --- released GPUs ---

    def _next_gpus(self, now: float, ledger: Ledger) -> bool:
        releasing = frozenset((uuid, each.since) for uuid, each in ledger.releasing.items())
        new, self._releasing = releasing - self._releasing, releasing
        if new:
            self._gpu_looks = 0
        if not releasing or not (new or self._gpus_due is None):
            return False
        self._gpus_due = now + min(FIRST_PAUSE_S * 2.0 ** min(self._gpu_looks, 32), LONGEST_PAUSE_S)
        self._gpu_looks += 1
        return True

    def _dues(self, ledger: Ledger, means: Means) -> Iterator[float]:
        """Yield all times at which something is to be looked at or over."""
        yield from (at + TOLD_WITHIN_S for at in self._ended.values())
        yield from (since + STARTS_S + _LATE_S for since in _stopping(ledger))
        yield from (since + after_s for since in ledger.lost.values() for after_s in (WARNED_AFTER_S, STUCK_AFTER_S))
        if self._lost and not means.told:
            yield self._look_due
        known = (each for id_, each in ledger.entries.items() if id_ in ledger.processes)
        yield from (_deadline(each, means.grace_s) + _LATE_S for each in known if means.tells)
        if self._unstarted_due is not None:
            yield self._unstarted_due
        if self._walk:
            yield self._walk[0] + WALK_LATE_S
        elif ledger.unsought:
            yield self._walk_due
        if self._gpus_due is not None and ledger.releasing:
            yield self._gpus_due


def _uuids(ledger: Ledger, container_id: ContainerId) -> Iterable[GpuUuid]:
    entry, opened = ledger.entries.get(container_id), ledger.external.get(container_id)
    return entry.grant.held if entry and entry.lost else opened.held if opened else ()


def _stopping(ledger: Ledger) -> Iterator[float]:
    """Yield since when containers are to be stopped during their starts, which may go on."""
    for id_, since in ledger.starting.items():
        if since is not None and ledger.entries[id_].phase is GrantPhase.RUNNING:
            yield since


def _unstarted(ledger: Ledger, means: Means) -> Mapping[ContainerId, Entry]:
    """Return the containers that were created and hold a GPU, and not for good, where no refused start is heeded."""
    if means.tells:
        return {}
    created = {id_: each for id_, each in ledger.entries.items() if each.phase is GrantPhase.CREATED}
    return {id_: each for id_, each in created.items() if each.grant.held and each.until is not Lapse.NEVER}


def _deadline(entry: Entry, grace_s: float) -> float:
    if entry.phase is not GrantPhase.CREATED or entry.until is Lapse.NEVER:
        return float("-inf")
    return entry.since + grace_s if entry.until is Lapse.AFTER_GRACE else entry.until
