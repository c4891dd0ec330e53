"""Who had a GPU exclusively and is gone, while others may not have it yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final, TypeVar

from msgspec import Struct, field
from msgspec.structs import force_setattr, replace

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId, DeviceNumber, PodId, PodUid
from nri_gpu.domain.decision import Decision, Grant, Inject
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.value import Value


class Releasing(Struct, frozen=True):
    """The pod that left one GPU or MIG device.

    pod: its `namespace/name`. since: seconds on the shell's monotonic clock when its container ended.
    grace_s: seconds after which nothing is waited for any more. processes: how many a look after that found on it;
    None as long as none could tell.
    """

    pod_uid: PodUid
    pod: str
    since: float
    grace_s: float
    processes: int | None = None

    def blocks(self, pod_uid: PodUid) -> bool:
        """Whether a container of that pod must wait: exclusive is to the pod, so its own need not."""
        return pod_uid != self.pod_uid

    def __str__(self) -> str:
        """`ml/train: 2 processes still hold it`."""
        if self.processes is None:
            return f"{self.pod}: whether processes still hold it is not known yet"
        return f"{self.pod}: {self.processes} process{'es still hold' if self.processes > 1 else ' still holds'} it"


class GrantPhase(StrEnum):
    """Where in its life a granted container is."""

    CREATED = "created"
    RUNNING = "running"
    LAPSED = "lapsed"


class Entry(Value, frozen=True):
    """One grant in the ledger.

    since: seconds on the shell's monotonic clock when this phase began; infinite where that is not known. until: on the
    same clock, when it lapses unless it started; infinite: never; None: when the grace since then is over.
    """

    aside: ClassVar = ("since", "until")

    grant: Grant
    phase: GrantPhase
    since: float
    until: float | None = None

    def is_over(self, now: float, grace_s: float) -> bool:
        """Whether it should have started by now."""
        end = self.since + grace_s if self.until is None else self.until
        return self.phase is GrantPhase.CREATED and now > end

    @property
    def holds(self) -> bool:
        """Whether it keeps its GPUs from others."""
        return self.phase is not GrantPhase.LAPSED


class Live(Struct, frozen=True):
    """What a container that exists has, whoever gave it, and whatever it was granted.

    pod: `namespace/name`. numbers: of the devices that it can open. staged: generations of driver files that it mounts.
    """

    container_id: ContainerId
    container: str
    pod_id: PodId
    pod: str
    numbers: frozenset[DeviceNumber] = frozenset()
    staged: frozenset[str] = frozenset()


class ExternalAllocation(Struct, frozen=True):
    """A container that can open GPUs and MIG devices which no valid mark of ours on it names.

    container: its name, where it was granted others and its numbers became these; empty where somebody else gave them.
    """

    container_id: ContainerId
    pod_id: PodId
    pod: str
    uuids: frozenset[GpuUuid]
    container: str = ""


class Usage(Value, frozen=True):
    """Who is on one GPU.

    pods: pod uid -> `namespace/name` of those we granted it. grants: what mode, pods and containers are told by.
    leaver: who had it before, as long as other pods wait for that.
    """

    aside: ClassVar = ("grants",)

    mode: Mode | None = None
    pods: Mapping[PodUid, str] = field(default_factory=dict)
    containers: int = 0
    external: Mapping[ContainerId, ExternalAllocation] = field(default_factory=dict)
    grants: Mapping[ContainerId, Grant] = field(default_factory=dict)
    releasing: Releasing | None = None

    @property
    def load(self) -> int:
        """Containers on it, ours and others'."""
        return self.containers + len(self.external)

    def blocks(self, mode: Mode, pod_uid: PodUid) -> bool:
        """Whether a container of that pod cannot have this GPU in that mode."""
        return self.held_from(mode, pod_uid) or (self.releasing is not None and self.releasing.blocks(pod_uid))

    def held_from(self, mode: Mode, pod_uid: PodUid) -> bool:
        """Whether those who hold it now are why. Modes never mix on one GPU."""
        if self.mode is not None and self.mode is not mode:
            return True
        if mode is Mode.SHARED:
            return False
        if mode is Mode.MPS:  # its daemon takes the GPU for itself (EXCLUSIVE_PROCESS)
            return bool(self.external)
        return bool(self.external) or any(uid != pod_uid for uid in self.pods)

    def plus(self, grant: Grant) -> Usage:
        """With one more container on it."""
        # A lapsed container that started while we were away may have left two modes on one GPU.
        mode = next((each for each in _STRICTEST_FIRST if each in (self.mode, grant.mode)), None)
        pods = {**self.pods, grant.pod_uid: f"{grant.namespace}/{grant.pod_name}"}
        grants = {**self.grants, grant.container_id: grant}
        return Usage(mode, pods, self.containers + 1, self.external, grants, self.releasing)

    def minus(self, container_id: ContainerId) -> Usage:
        """Without that container."""
        usage = Usage(external=self.external, releasing=self.releasing)
        for grant in self.grants.values():
            if grant.container_id != container_id:
                usage = usage.plus(grant)
        return usage


_STRICTEST_FIRST: Final = (Mode.EXCLUSIVE, Mode.MPS, Mode.SHARED)
UNUSED: Final = Usage()
NOT_TOLD: Final[Mapping[GpuUuid, Usage]] = MappingProxyType({})  # another one than any that is empty


class Ledger(Value, frozen=True):
    """All grants, by container.

    foreign: GPUs that containers can open and were not granted. leaving: GPUs that other pods wait for.
    live: what containers have; which GPUs that is changes with the node, and `foreign` with it (`foreign.py`).
    The last two are told by the first three, and handed on from one ledger to the next so that a change costs what it
    changes: with 500 containers, telling them anew took three times as long as all the rest of a grant.
    _waiting: entries that do not run, which time and their pod's next attempt can end.
    """

    aside: ClassVar = ("_usage", "_waiting")

    entries: Mapping[ContainerId, Entry] = field(default_factory=lambda: MappingProxyType({}))
    external: Mapping[ContainerId, ExternalAllocation] = field(default_factory=lambda: MappingProxyType({}))
    releasing: Mapping[GpuUuid, Releasing] = field(default_factory=lambda: MappingProxyType({}))
    live: Mapping[ContainerId, Live] = field(default_factory=lambda: MappingProxyType({}))
    _usage: Mapping[GpuUuid, Usage] = field(default_factory=lambda: NOT_TOLD)
    _waiting: Mapping[ContainerId, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self._usage is NOT_TOLD:
            waiting = {id_: entry for id_, entry in self.entries.items() if entry.phase is not GrantPhase.RUNNING}
            force_setattr(self, "_usage", _told(self.entries.values(), self.external.values(), self.releasing))
            force_setattr(self, "_waiting", waiting)

    def usage(self) -> Mapping[GpuUuid, Usage]:
        """GPU -> who is on it; GPUs that nobody holds, and nobody has just left, are absent."""
        return self._usage

    def after(self, decision: Decision, now: float) -> Ledger:
        """With what was decided; only an Inject changes it. The same container twice is one entry."""
        if not isinstance(decision, Inject):
            return self
        grant = decision.grant
        kept = self.without_predecessors(grant.container_id, grant.pod_uid, grant.container_name)
        return kept.with_entry(Entry(grant, GrantPhase.CREATED, now))

    def without_predecessors(self, container_id: ContainerId, pod_uid: PodUid, name: str) -> Ledger:
        """Without other containers of that pod and name that never ran.

        The kubelet makes the next attempt only after the last one is dead, and a failed start sent no event.
        One that did run is left alone: its exit is reported.
        """
        if not self._waiting:
            return self
        return self._without(
            id_
            for id_, entry in self._waiting.items()
            if entry.grant.container_name == name and entry.grant.pod_uid == pod_uid and id_ != container_id
        )

    def lapse(self, now: float, grace_s: float) -> Ledger:
        """With grants that were not started within the grace (seconds) holding nothing any more."""
        ledger = self
        for entry in self._waiting.values():
            if entry.is_over(now, grace_s):
                ledger = ledger.with_entry(_lapsed(entry, now))
        return ledger

    def started(self, container_id: ContainerId, now: float) -> Ledger | None:
        """With that container running; None when it lapsed and its GPUs were taken: it must not start."""
        entry = self.entries.get(container_id)
        if entry is None:
            return self
        if entry.phase is GrantPhase.LAPSED and _taken(entry.grant, self._usage):
            return None
        return self.with_entry(Entry(entry.grant, GrantPhase.RUNNING, now))

    def released(self, container_id: ContainerId) -> Ledger:
        """Without that container; unknown ids change nothing."""
        return self._without((container_id,))

    def stopped(self, container_id: ContainerId, now: float) -> Ledger:
        """With that container's program over.

        One that never ran can still be started afterwards (containerd stops a created container without
        forgetting it), so its grant lapses instead of being forgotten.
        """
        entry = self.entries.get(container_id)
        if entry is None or entry.phase is GrantPhase.RUNNING:
            return self.released(container_id)
        return self.with_entry(_lapsed(entry, now))

    def pod_gone(self, pod_id: PodId) -> Ledger:
        """Without any container of that sandbox."""
        gone = [id_ for id_, entry in self.entries.items() if entry.grant.pod_id == pod_id]
        for others in (self.external, self.live):
            gone += [id_ for id_, other in others.items() if other.pod_id == pod_id]
        return self._without(gone)

    def with_external(self, foreign: ExternalAllocation) -> Ledger:
        """With a container that can open GPUs which it was not granted."""
        return self.with_all_external({**self.external, foreign.container_id: foreign})

    def with_live(self, live: Live) -> Ledger:
        """With what that container has."""
        if self.live.get(live.container_id) == live:
            return self
        known = _copied(self.live)
        known[live.container_id] = live
        return Ledger(self.entries, self.external, self.releasing, _frozen(known), self._usage, self._waiting)

    def with_all_external(self, external: Mapping[ContainerId, ExternalAllocation]) -> Ledger:
        """With exactly these containers that can open GPUs which they were not granted."""
        if external == self.external:
            return self
        usage = dict(self._usage)
        changed = [id_ for id_ in self.external.keys() | external.keys() if self.external.get(id_) != external.get(id_)]
        for id_ in changed:
            _move_external(usage, id_, self.external.get(id_), external.get(id_))
        return Ledger(self.entries, _frozen(dict(external)), self.releasing, self.live, usage, self._waiting)

    def with_releasing(self, leaving: Mapping[GpuUuid, Releasing]) -> Ledger:
        """With exactly these GPUs kept for a while from other pods than those that left them."""
        if leaving == self.releasing:
            return self
        usage = dict(self._usage)
        for uuid in self.releasing.keys() | leaving.keys():
            use = replace(usage.pop(uuid, UNUSED), releasing=leaving.get(uuid))
            if use != UNUSED:
                usage[uuid] = use
        return Ledger(self.entries, self.external, MappingProxyType(dict(leaving)), self.live, usage, self._waiting)

    def generations(self) -> frozenset[str]:
        """Driver generations that containers still have mounted, and those of compatibility packages."""
        granted = frozenset(each for entry in self.entries.values() for each in entry.grant.generations)
        return granted.union(*(live.staged for live in self.live.values()))

    def with_entry(self, entry: Entry) -> Ledger:
        """With that entry in place of any of the same container."""
        id_ = entry.grant.container_id
        usage, old = self._usage, self.entries.get(id_)
        if old is None or old.grant is not entry.grant or old.holds is not entry.holds:
            usage = _moved(usage, old, entry)
        entries, waiting = _copied(self.entries), dict(self._waiting)
        entries[id_] = entry
        waiting.pop(id_, None)
        if entry.phase is not GrantPhase.RUNNING:
            waiting[id_] = entry
        return Ledger(_frozen(entries), self.external, self.releasing, self.live, usage, waiting)

    def _without(self, ids: Iterable[ContainerId]) -> Ledger:
        gone = [id_ for id_ in dict.fromkeys(ids) if id_ in self.entries or id_ in self.external or id_ in self.live]
        if not gone:
            return self
        usage, entries, waiting = self._usage, _copied(self.entries), dict(self._waiting)
        foreign, live = _copied(self.external), _copied(self.live)
        for id_ in gone:
            if id_ in entries:
                usage = _moved(usage, entries.pop(id_), None)
            if id_ in foreign:
                usage = dict(usage)
                _move_external(usage, id_, foreign.pop(id_), None)
            waiting.pop(id_, None)
            live.pop(id_, None)
        return Ledger(_frozen(entries), _frozen(foreign), self.releasing, _frozen(live), usage, waiting)


def rebuilt(
    entries: Iterable[Entry],
    foreign: Iterable[ExternalAllocation],
    leaving: Mapping[GpuUuid, Releasing] = MappingProxyType({}),
    live: Iterable[Live] = (),
) -> Ledger:
    """The ledger that the runtime's own list of containers tells, at Synchronize.

    The list does not say which created containers had lapsed: one whose GPUs we gave to somebody else by now did;
    of two created ones the first listed holds. A lapsed one whose GPUs nobody took holds anew, for another grace.
    Foreign holders do not count there: they may have come after the grant, and take nothing from one that holds.
    leaving: of the ledger so far, since no list tells it.
    """
    kept: dict[ContainerId, Entry] = {}
    usage: Mapping[GpuUuid, Usage] = _told((), (), leaving)
    for entry in sorted(entries, key=lambda entry: entry.phase is not GrantPhase.RUNNING):
        id_ = entry.grant.container_id
        lapsed = entry.phase is GrantPhase.CREATED and _taken(entry.grant, usage)
        told = _lapsed(entry, entry.since) if lapsed else entry
        usage, kept[id_] = _moved(usage, kept.get(id_), told), told
    others = _frozen({other.container_id: other for other in foreign})
    return Ledger(_frozen(kept), others, leaving, _frozen({each.container_id: each for each in live}))


def _lapsed(entry: Entry, now: float) -> Entry:
    return Entry(entry.grant, GrantPhase.LAPSED, now)


def _taken(grant: Grant, usage: Mapping[GpuUuid, Usage]) -> bool:
    mode = grant.mode
    return mode is not None and any(usage.get(uuid, UNUSED).blocks(mode, grant.pod_uid) for uuid in grant.uuids)


def _told(
    entries: Iterable[Entry], foreign: Iterable[ExternalAllocation], leaving: Mapping[GpuUuid, Releasing]
) -> Mapping[GpuUuid, Usage]:
    usage = {uuid: Usage(releasing=leaver) for uuid, leaver in leaving.items()}
    for entry in entries:
        if entry.holds:
            for uuid in entry.grant.uuids:
                usage[uuid] = usage.get(uuid, UNUSED).plus(entry.grant)
    for other in foreign:
        _move_external(usage, other.container_id, None, other)
    return usage


def _move_external(
    usage: dict[GpuUuid, Usage], by: ContainerId, old: ExternalAllocation | None, new: ExternalAllocation | None
) -> None:
    """With what a container can open replaced."""
    for uuid in (old.uuids if old else frozenset()) | (new.uuids if new else frozenset()):
        use = usage.pop(uuid, UNUSED)
        others = {id_: other for id_, other in use.external.items() if id_ != by}
        if new is not None and uuid in new.uuids:
            others[by] = new
        use = replace(use, external=others)
        if use.load or use.releasing:
            usage[uuid] = use


def _moved(usage: Mapping[GpuUuid, Usage], old: Entry | None, new: Entry | None) -> Mapping[GpuUuid, Usage]:
    """With a container's entry replaced. GPUs that were used alike before share one value afterwards too."""
    after = dict(usage)
    if old is not None and old.holds:
        less: dict[int, Usage] = {}
        for uuid in old.grant.uuids:
            if use := after.pop(uuid, None):
                left = less.get(id(use)) or less.setdefault(id(use), use.minus(old.grant.container_id))
                if left.load or left.releasing:
                    after[uuid] = left
    if new is not None and new.holds:
        more: dict[int, Usage] = {}
        for uuid in new.grant.uuids:
            use = after.get(uuid, UNUSED)
            after[uuid] = more.get(id(use)) or more.setdefault(id(use), use.plus(new.grant))
    return after


V = TypeVar("V")


def _copied(items: Mapping[ContainerId, V]) -> dict[ContainerId, V]:
    # A proxy copies all that it stands for at once; dict() would ask it key by key.
    return items.copy() if isinstance(items, MappingProxyType) else dict(items)


def _frozen(items: dict[ContainerId, V]) -> Mapping[ContainerId, V]:
    return MappingProxyType(items)
