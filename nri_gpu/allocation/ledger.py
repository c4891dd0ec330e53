"""The ledger: which container holds which GPU, which are reserved or being released, and who is on each GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import reduce
from types import MappingProxyType
from typing import ClassVar, Final, TypeVar

from msgspec import Struct, field
from msgspec.structs import force_setattr, replace

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId, DeviceNumber, PodId, PodUid
from nri_gpu.domain.decision import Decision, Grant, Inject
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.kubelet import AllocatedDevice
from nri_gpu.domain.value import Value


class Releasing(Struct, frozen=True):
    """A GPU or MIG device that one pod held exclusively and has released, while its processes may still be on it.

    pod: that pod's `namespace/name`. since: seconds on the monotonic clock when its container ended. grace_s: seconds
    after which other pods get the GPU whatever NVML shows. processes: how many NVML has shown on it since; None while
    it could not tell.
    """

    pod_uid: PodUid
    pod: str
    since: float
    grace_s: float
    processes: int | None = None

    def blocks(self, pod_uid: PodUid) -> bool:
        """Whether a container of that pod must wait: exclusive is to the pod, so its own containers need not."""
        return pod_uid != self.pod_uid

    def __str__(self) -> str:
        """`ml/train: 2 processes still hold it`."""
        if self.processes is None:
            return f"{self.pod}: whether processes still hold it is not known yet"
        return f"{self.pod}: {self.processes} process{'es still hold' if self.processes > 1 else ' still holds'} it"


class GrantPhase(StrEnum):
    """How far a granted container has come."""

    CREATED = "created"
    RUNNING = "running"
    LAPSED = "lapsed"


class Lapse(StrEnum):
    """When a created container lapses, where that is no point in time of its own."""

    AFTER_GRACE = "grace"  # the policy's `created_grace_s` after it was created
    # Never where the runtime listed it as created: it may be in the middle of its start, an event that we then do not
    # get. It holds until it is removed or its pod's next attempt is made: too long if it failed, never granted twice.
    NEVER = "inf"


class Entry(Value, frozen=True):
    """One grant in the ledger.

    since: seconds on the monotonic clock when this phase began. until: on the same clock, when a created container
    lapses unless it starts.
    """

    aside: ClassVar = ("since", "until")

    grant: Grant
    phase: GrantPhase
    since: float
    until: Lapse | float = Lapse.AFTER_GRACE

    def is_over(self, now: float, grace_s: float) -> bool:
        """Whether it was created and should have started by now. grace_s: the policy's `created_grace_s`."""
        if self.phase is not GrantPhase.CREATED or self.until is Lapse.NEVER:
            return False
        return now > (self.since + grace_s if self.until is Lapse.AFTER_GRACE else self.until)

    @property
    def holds(self) -> bool:
        """Whether it keeps its GPUs from others."""
        return self.phase is not GrantPhase.LAPSED


UNNAMED_POD: Final = PodUid("kubelet")  # of a pod that the kubelet has allocated to and nobody has named yet


class Reservation(Struct, frozen=True, kw_only=True):
    """A device that the kubelet allocated to a pod of which no container has it now.

    It keeps the device's GPU from others as a grant does. namespace, pod_name: "kubelet" and the resource while nobody
    has named the pod; pod_uid is then UNNAMED_POD. since, until: seconds on the monotonic clock when it began, and when
    it lapses; until None: it is kept as long as the pod's sandbox is there.
    """

    device: AllocatedDevice
    mode: Mode
    namespace: str
    pod_name: str
    since: float
    until: float | None
    pod_uid: PodUid = UNNAMED_POD
    pod_id: PodId = PodId("")
    container_name: str = "-"


class Live(Struct, frozen=True):
    """The devices that an existing container has, whoever assigned them, and whatever it was granted.

    pod: `namespace/name`. numbers: of the devices that it can open. staged: generations of driver files that it mounts.
    """

    container_id: ContainerId
    container: str
    pod_id: PodId
    pod: str
    numbers: frozenset[DeviceNumber] = frozenset()
    staged: frozenset[str] = frozenset()


class ExternalAllocation(Struct, frozen=True):
    """A container that can open GPUs and MIG devices which no signed grant on it names.

    container: its name, where it was granted other GPUs and its device numbers became these GPUs'; empty where another
    component assigned them.
    """

    container_id: ContainerId
    pod_id: PodId
    pod: str
    uuids: frozenset[GpuUuid]
    container: str = ""


class Usage(Value, frozen=True):
    """Who is on one GPU.

    mode, pods, containers: of all grants and reservations; pods: pod uid -> `namespace/name`. releasing: which pod held
    it before, as long as other pods wait for that.
    """

    aside: ClassVar = ("grants", "reservations")

    mode: Mode | None = None
    pods: Mapping[PodUid, str] = field(default_factory=dict)
    containers: int = 0
    external: Mapping[ContainerId, ExternalAllocation] = field(default_factory=dict)
    grants: Mapping[ContainerId, Grant] = field(default_factory=dict)
    reservations: Mapping[AllocatedDevice, Reservation] = field(default_factory=dict)
    releasing: Releasing | None = None

    @property
    def load(self) -> int:
        """How many containers and reservations are on it."""
        return self.containers + len(self.external)

    def blocks(self, mode: Mode, pod_uid: PodUid) -> bool:
        """Whether a container of that pod cannot have this GPU in that mode."""
        return self.held_from(mode, pod_uid) or (self.releasing is not None and self.releasing.blocks(pod_uid))

    def held_from(self, mode: Mode, pod_uid: PodUid) -> bool:
        """Whether those who hold it now are the reason. Modes never mix on one GPU."""
        if self.mode is not None and self.mode is not mode:
            return True
        if mode is Mode.SHARED:
            return False
        if mode is Mode.MPS:  # the daemon takes the GPU for itself (EXCLUSIVE_PROCESS)
            return bool(self.external)
        return bool(self.external) or any(uid != pod_uid for uid in self.pods)

    def plus(self, holder: Grant | Reservation) -> Usage:
        """With one more container or reservation on it."""
        # A lapsed container that started while we were away may have left two modes on one GPU.
        mode = next((each for each in _STRICTEST_FIRST if each in (self.mode, holder.mode)), None)
        pods = {**self.pods, holder.pod_uid: f"{holder.namespace}/{holder.pod_name}"}
        grants, reservations = self.grants, self.reservations
        if isinstance(holder, Grant):
            grants = {**grants, holder.container_id: holder}
        else:
            reservations = {**reservations, holder.device: holder}
        return Usage(mode, pods, self.containers + 1, self.external, grants, reservations, self.releasing)

    def minus(self, gone: ContainerId | AllocatedDevice) -> Usage:
        """Without that container or reservation."""
        usage = Usage(external=self.external, releasing=self.releasing)
        left: list[Grant | Reservation] = [grant for id_, grant in self.grants.items() if id_ != gone]
        left += [each for device, each in self.reservations.items() if device != gone]
        return reduce(Usage.plus, left, usage)


_STRICTEST_FIRST: Final = (Mode.EXCLUSIVE, Mode.MPS, Mode.SHARED)
UNUSED: Final = Usage()
_UNKNOWN: Final[Mapping[GpuUuid, Usage]] = MappingProxyType({})  # another object than any empty mapping


class Ledger(Value, frozen=True):
    """All grants, by container, and all reservations, by device.

    external: GPUs that containers can open and were not granted. releasing: GPUs that other pods wait for. live: the
    devices that containers have; which GPUs these are changes with the node, and `external` with it (`external.py`).
    _usage and _waiting (entries that do not run) follow from these, and go on from one ledger to the next so that a
    change costs what it changes: with 500 containers, computing them anew took three times as long as a whole grant.
    """

    aside: ClassVar = ("_usage", "_waiting")

    entries: Mapping[ContainerId, Entry] = field(default_factory=lambda: MappingProxyType({}))
    external: Mapping[ContainerId, ExternalAllocation] = field(default_factory=lambda: MappingProxyType({}))
    releasing: Mapping[GpuUuid, Releasing] = field(default_factory=lambda: MappingProxyType({}))
    live: Mapping[ContainerId, Live] = field(default_factory=lambda: MappingProxyType({}))
    reservations: Mapping[AllocatedDevice, Reservation] = field(default_factory=lambda: MappingProxyType({}))
    _usage: Mapping[GpuUuid, Usage] = field(default_factory=lambda: _UNKNOWN)
    _waiting: Mapping[ContainerId, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self._usage is _UNKNOWN:
            waiting = {id_: entry for id_, entry in self.entries.items() if entry.phase is not GrantPhase.RUNNING}
            force_setattr(self, "_usage", _usage_of(self))
            force_setattr(self, "_waiting", waiting)

    def usage(self) -> Mapping[GpuUuid, Usage]:
        """GPU -> who is on it; GPUs that nobody holds, and nobody has just left, are absent."""
        return self._usage

    def after(self, decision: Decision, now: float) -> Ledger:
        """With what was decided; only an Inject changes it. The same container twice is one entry."""
        if not isinstance(decision, Inject):
            return self
        return self.with_entry(Entry(decision.grant, GrantPhase.CREATED, now))

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
        """With grants that were not started within the grace (seconds), and old reservations, holding nothing."""
        ledger = self.without_reservations(
            device for device, each in self.reservations.items() if each.until is not None and now > each.until
        )
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

    def with_external(self, external: ExternalAllocation) -> Ledger:
        """With a container that can open GPUs which it was not granted."""
        return self.with_all_external({**self.external, external.container_id: external})

    def with_live(self, live: Live) -> Ledger:
        """With what that container has."""
        if self.live.get(live.container_id) == live:
            return self
        known = _copied(self.live)
        known[live.container_id] = live
        return replace(self, live=_frozen(known))

    def with_all_external(self, external: Mapping[ContainerId, ExternalAllocation]) -> Ledger:
        """With exactly these containers that can open GPUs which they were not granted."""
        if external == self.external:
            return self
        usage = dict(self._usage)
        changed = [id_ for id_ in self.external.keys() | external.keys() if self.external.get(id_) != external.get(id_)]
        for id_ in changed:
            _move_external(usage, id_, self.external.get(id_), external.get(id_))
        return replace(self, external=_frozen(dict(external)), _usage=usage)

    def with_releasing(self, releasing: Mapping[GpuUuid, Releasing]) -> Ledger:
        """With exactly these GPUs kept for a while from other pods than those that released them."""
        if releasing == self.releasing:
            return self
        usage = dict(self._usage)
        for uuid in self.releasing.keys() | releasing.keys():
            use = replace(usage.pop(uuid, UNUSED), releasing=releasing.get(uuid))
            if use != UNUSED:
                usage[uuid] = use
        return replace(self, releasing=_frozen(dict(releasing)), _usage=usage)

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
        return replace(self, entries=_frozen(entries), _usage=usage, _waiting=waiting)

    def with_reservation(self, reservation: Reservation) -> Ledger:
        """With that reservation in place of any of the same device."""
        device = reservation.device
        usage = dict(self.without_reservations((device,))._usage)
        usage[device.uuid] = usage.get(device.uuid, UNUSED).plus(reservation)
        return replace(self, reservations=_frozen({**self.reservations, device: reservation}), _usage=usage)

    def without_reservations(self, devices: Iterable[AllocatedDevice]) -> Ledger:
        """Without the reservations of these devices; other devices change nothing."""
        gone = [device for device in dict.fromkeys(devices) if device in self.reservations]
        if not gone:
            return self
        usage = dict(self._usage)
        for device in gone:
            left = usage.pop(device.uuid).minus(device)
            if left != UNUSED:
                usage[device.uuid] = left
        left_over = {device: each for device, each in self.reservations.items() if device not in gone}
        return replace(self, reservations=_frozen(left_over), _usage=usage)

    def _without(self, ids: Iterable[ContainerId]) -> Ledger:
        gone = [id_ for id_ in dict.fromkeys(ids) if id_ in self.entries or id_ in self.external or id_ in self.live]
        if not gone:
            return self
        usage, entries, waiting = self._usage, _copied(self.entries), dict(self._waiting)
        external, live = _copied(self.external), _copied(self.live)
        for id_ in gone:
            if id_ in entries:
                usage = _moved(usage, entries.pop(id_), None)
            if id_ in external:
                usage = dict(usage)
                _move_external(usage, id_, external.pop(id_), None)
            waiting.pop(id_, None)
            live.pop(id_, None)
        return replace(
            self,
            entries=_frozen(entries),
            external=_frozen(external),
            live=_frozen(live),
            _usage=usage,
            _waiting=waiting,
        )


def rebuilt(
    entries: Iterable[Entry],
    external: Iterable[ExternalAllocation],
    releasing: Mapping[GpuUuid, Releasing] = MappingProxyType({}),
    live: Iterable[Live] = (),
    reservations: Iterable[Reservation] = (),
) -> Ledger:
    """The ledger as the runtime's list of containers shows it, at Synchronize.

    The list does not say which created containers had lapsed. One whose GPUs another container holds has; of two
    created ones the first in the list holds. One whose GPUs nobody took holds them again, for another grace. External
    allocations do not count here: they may have come after the grant.
    releasing, reservations: of the ledger so far, since no list shows them. A reservation gives way to grants.
    """
    kept: dict[ContainerId, Entry] = {}
    usage: Mapping[GpuUuid, Usage] = _usage_of(Ledger(releasing=releasing))
    for entry in sorted(entries, key=lambda entry: entry.phase is not GrantPhase.RUNNING):
        id_ = entry.grant.container_id
        lapsed = entry.phase is GrantPhase.CREATED and _taken(entry.grant, usage)
        kept_as = _lapsed(entry, entry.since) if lapsed else entry
        usage, kept[id_] = _moved(usage, kept.get(id_), kept_as), kept_as
    others = _frozen({other.container_id: other for other in external})
    ledger = Ledger(_frozen(kept), others, releasing, _frozen({each.container_id: each for each in live}))
    for each in reservations:
        if not usage.get(each.device.uuid, UNUSED).held_from(each.mode, each.pod_uid):
            ledger = ledger.with_reservation(each)
    return ledger


def _lapsed(entry: Entry, now: float) -> Entry:
    return Entry(entry.grant, GrantPhase.LAPSED, now)


def _taken(grant: Grant, usage: Mapping[GpuUuid, Usage]) -> bool:
    mode = grant.mode
    return mode is not None and any(usage.get(uuid, UNUSED).blocks(mode, grant.pod_uid) for uuid in grant.uuids)


def _usage_of(ledger: Ledger) -> Mapping[GpuUuid, Usage]:
    usage = {uuid: Usage(releasing=releasing) for uuid, releasing in ledger.releasing.items()}
    for entry in ledger.entries.values():
        if entry.holds:
            for uuid in entry.grant.uuids:
                usage[uuid] = usage.get(uuid, UNUSED).plus(entry.grant)
    for each in ledger.reservations.values():
        usage[each.device.uuid] = usage.get(each.device.uuid, UNUSED).plus(each)
    for other in ledger.external.values():
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


K = TypeVar("K")
V = TypeVar("V")


def _copied(items: Mapping[K, V]) -> dict[K, V]:
    # A proxy copies all that it stands for at once; dict() would ask it key by key.
    return items.copy() if isinstance(items, MappingProxyType) else dict(items)


def _frozen(items: dict[K, V]) -> Mapping[K, V]:
    return MappingProxyType(items)
