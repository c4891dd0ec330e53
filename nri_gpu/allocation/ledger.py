"""Who holds which GPU. A value: every change gives a new Ledger, and nobody can see half of one.

A grant's life, and what moves it:

    CREATED --start--> RUNNING --stop/remove/pod gone--> (released)
    CREATED --grace over--> LAPSED --start, GPUs still free--> RUNNING
                            LAPSED --start, GPUs taken--> refused

A container whose start fails inside runc sends no event at all, hence LAPSED: it holds nothing, but is remembered
in case it starts after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeVar

from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Decision, Grant, Inject
from nri_gpu.domain.gpu import GpuUuid


class Phase(StrEnum):
    """Where in its life a granted container is."""

    CREATED = "created"
    RUNNING = "running"
    LAPSED = "lapsed"


@dataclass(frozen=True, slots=True)
class Entry:
    """One grant in the ledger. since: seconds on the shell's monotonic clock when this phase began."""

    grant: Grant
    phase: Phase
    since: float = field(compare=False)

    @property
    def holds(self) -> bool:
        """Whether it keeps its GPUs from others."""
        return self.phase is not Phase.LAPSED


@dataclass(frozen=True, slots=True)
class Foreign:
    """A container with NVIDIA nodes that others put there (no valid mark of ours)."""

    container_id: ContainerId
    pod_id: PodId
    pod: str
    uuids: frozenset[GpuUuid]


@dataclass(frozen=True, slots=True)
class Usage:
    """Who is on one GPU. pods: pod uid -> `namespace/name` of those we granted it."""

    mode: Mode | None = None
    pods: Mapping[PodUid, str] = field(default_factory=dict)
    containers: int = 0
    foreign: tuple[str, ...] = ()

    @property
    def load(self) -> int:
        """Containers on it, ours and others'."""
        return self.containers + len(self.foreign)

    def blocks(self, mode: Mode, pod_uid: PodUid) -> bool:
        """Whether a container of that pod cannot have this GPU in that mode. Modes never mix on one GPU."""
        if self.mode is not None and self.mode is not mode:
            return True
        if mode is Mode.SHARED:
            return False
        return bool(self.foreign) or any(uid != pod_uid for uid in self.pods)


UNUSED: Final = Usage()


@dataclass(frozen=True, slots=True)
class Ledger:
    """All grants, by container. foreign: nodes that were not ours to give."""

    entries: Mapping[ContainerId, Entry] = field(default_factory=lambda: MappingProxyType({}))
    foreign: Mapping[ContainerId, Foreign] = field(default_factory=lambda: MappingProxyType({}))

    def usage(self) -> Mapping[GpuUuid, Usage]:
        """GPU -> who is on it; GPUs that nobody holds are absent."""
        usage: dict[GpuUuid, Usage] = {}
        for entry in self.entries.values():
            if entry.holds:
                grant = entry.grant
                for uuid in grant.uuids:
                    old = usage.get(uuid, UNUSED)
                    pods = {**old.pods, grant.pod_uid: f"{grant.namespace}/{grant.pod_name}"}
                    # A lapsed container that started while we were away may have left both modes on one GPU.
                    mode = Mode.EXCLUSIVE if Mode.EXCLUSIVE in (old.mode, grant.mode) else grant.mode
                    usage[uuid] = replace(old, mode=mode, pods=pods, containers=old.containers + 1)
        for other in self.foreign.values():
            for uuid in other.uuids:
                old = usage.get(uuid, UNUSED)
                usage[uuid] = replace(old, foreign=(*old.foreign, other.pod))
        return usage

    def after(self, decision: Decision, now: float) -> Ledger:
        """With what was decided; only an Inject changes it. The same container twice is one entry."""
        if not isinstance(decision, Inject):
            return self
        grant = decision.grant
        kept = self.without_predecessors(grant.container_id, grant.pod_uid, grant.container_name)
        return kept.with_entry(Entry(grant, Phase.CREATED, now))

    def without_predecessors(self, container_id: ContainerId, pod_uid: PodUid, name: str) -> Ledger:
        """Without other containers of that pod and name that never ran.

        The kubelet makes the next attempt only after the last one is dead, and a failed start sent no event.
        One that did run is left alone: its exit is reported.
        """
        return self._keep(
            lambda entry: (
                entry.phase is Phase.RUNNING
                or entry.grant.container_id == container_id
                or (entry.grant.pod_uid, entry.grant.container_name) != (pod_uid, name)
            )
        )

    def lapse(self, now: float, grace_s: float) -> Ledger:
        """With grants that were not started within the grace (seconds) holding nothing any more."""
        late = [e for e in self.entries.values() if e.phase is Phase.CREATED and now - e.since > grace_s]
        if not late:
            return self
        return replace(self, entries=_frozen({**self.entries, **{e.grant.container_id: _lapsed(e, now) for e in late}}))

    def started(self, container_id: ContainerId, now: float) -> Ledger | None:
        """With that container running; None when it lapsed and its GPUs were taken: it must not start."""
        entry = self.entries.get(container_id)
        if entry is None:
            return self
        if entry.phase is Phase.LAPSED and self._taken(entry.grant):
            return None
        return self.with_entry(replace(entry, phase=Phase.RUNNING, since=now))

    def released(self, container_id: ContainerId) -> Ledger:
        """Without that container; unknown ids change nothing."""
        if container_id not in self.entries and container_id not in self.foreign:
            return self
        return Ledger(
            entries=_frozen({k: v for k, v in self.entries.items() if k != container_id}),
            foreign=_frozen({k: v for k, v in self.foreign.items() if k != container_id}),
        )

    def stopped(self, container_id: ContainerId, now: float) -> Ledger:
        """With that container's program over.

        One that never ran can still be started afterwards (containerd stops a created container without
        forgetting it), so its grant lapses instead of being forgotten.
        """
        entry = self.entries.get(container_id)
        if entry is None or entry.phase is Phase.RUNNING:
            return self.released(container_id)
        return self.with_entry(_lapsed(entry, now))

    def pod_gone(self, pod_id: PodId) -> Ledger:
        """Without any container of that sandbox."""
        kept = self._keep(lambda entry: entry.grant.pod_id != pod_id)
        foreign = {k: v for k, v in self.foreign.items() if v.pod_id != pod_id}
        return kept if len(foreign) == len(self.foreign) else replace(kept, foreign=_frozen(foreign))

    def with_foreign(self, foreign: Foreign) -> Ledger:
        """With a container whose NVIDIA nodes are not ours."""
        return replace(self, foreign=_frozen({**self.foreign, foreign.container_id: foreign}))

    def generations(self) -> frozenset[str]:
        """Driver generations that containers still have mounted, and those of compatibility packages."""
        return frozenset(each for entry in self.entries.values() for each in entry.grant.generations)

    def _taken(self, grant: Grant) -> bool:
        usage = self.usage()
        mode = grant.mode
        return mode is not None and any(usage.get(uuid, UNUSED).blocks(mode, grant.pod_uid) for uuid in grant.uuids)

    def with_entry(self, entry: Entry) -> Ledger:
        """With that entry in place of any of the same container."""
        return replace(self, entries=_frozen({**self.entries, entry.grant.container_id: entry}))

    def _keep(self, wanted: Callable[[Entry], bool]) -> Ledger:
        kept = {k: v for k, v in self.entries.items() if wanted(v)}
        return self if len(kept) == len(self.entries) else replace(self, entries=_frozen(kept))


def rebuilt(entries: Iterable[Entry], foreign: Iterable[Foreign]) -> Ledger:
    """The ledger that the runtime's own list of containers tells, at Synchronize.

    The list does not say which created containers had lapsed: one whose GPUs we gave to somebody else by now did;
    of two created ones the first listed holds. A lapsed one whose GPUs nobody took holds anew, for another grace.
    Foreign holders do not count there: they may have come after the grant, and take nothing from one that holds.
    """
    ledger = Ledger()
    for entry in sorted(entries, key=lambda entry: entry.phase is not Phase.RUNNING):
        lapsed = entry.phase is Phase.CREATED and ledger._taken(entry.grant)
        ledger = ledger.with_entry(_lapsed(entry, entry.since) if lapsed else entry)
    return replace(ledger, foreign=_frozen({other.container_id: other for other in foreign}))


def _lapsed(entry: Entry, now: float) -> Entry:
    return replace(entry, phase=Phase.LAPSED, since=now)


V = TypeVar("V")


def _frozen(items: dict[ContainerId, V]) -> Mapping[ContainerId, V]:
    return MappingProxyType(items)
