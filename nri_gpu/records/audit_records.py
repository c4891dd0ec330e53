"""The records of the audit log, with all that decisions depend on; and the same decisions computed again.

A log is a list of records, each a JSON object with a `kind`:

    node      a snapshot of the node, before the first decision that used it
    policy    the policy's text, likewise; or the fault of one that could not be used
    ledger    all grants, at the beginning of a file and after each Synchronize
    changed   grants that are new, different or gone (null); likewise external allocations, releasing GPUs,
              reservations, prepared claims, and created containers that time does not lapse: their cgroups are
              looked for (`unsought`) or were found (`processes`)
    decision  a request and the answer to it
    cut       the same of a container that is too large to be recorded: its names, its annotation and the answer
    left_out  how many decisions on a pod are not in this file, because it had its share of it
    repaired  root said that a GPU was reset; no decision depends on it
    cordoned  a GPU was taken out of use by root, or back; decisions depend on the node, which shows it

`decide` is pure, so an unchanged replay by the same version gives every answer again to the byte. Sentences are
recorded for people and not compared: a refusal is its code, and another version may word it otherwise. With another
policy the replay keeps its own ledger: a container that is refused holds nothing, and one that is granted more lets it
lapse. Decisions that are cut or left out are passed over: what they changed in the ledger is in `changed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Final, TypeVar

from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace

from nri_gpu.decision.decide import decide
from nri_gpu.domain.allocation import AllocatedDevice, AllocationPending
from nri_gpu.domain.container import Container, ContainerId, FirstProcess
from nri_gpu.domain.decision import Decision, Inject, Pass, Refuse
from nri_gpu.domain.edits import Edits
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory, Node
from nri_gpu.domain.resource_claim import ClaimUid, PreparedClaim
from nri_gpu.domain.value import canonical, decode, encode
from nri_gpu.ledger.apply import apply, cleared_for
from nri_gpu.ledger.events import Created, Rules, Ticked
from nri_gpu.ledger.holders import ExternalAllocation, Releasing, Reservation
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger, without
from nri_gpu.ledger.reservations import reservation_id, reserved_device
from nri_gpu.policy.model import Policy
from nri_gpu.records.audit_limits import CutRecord, LeftOutRecord

Record = Mapping[str, object]
SCHEMA: Final = "nri-gpu/audit/v1"
_FORMER_FIELDS: Final = frozenset({"profiles"})  # of a node, which logs of earlier versions have
_SENTENCES: Final = frozenset({"reason", "note"})  # of an answer
K = TypeVar("K")
V = TypeVar("V")


class NodeRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="node"):
    schema: str = SCHEMA
    node: Record


class PolicyRecord(Struct, frozen=True, tag_field="kind", tag="policy"):
    """A policy as it was read. fault: why it could not be used, or empty."""

    source: str
    text: str
    fault: str = ""


class _LedgerRecord(Struct, frozen=True, tag_field="kind", tag="ledger"):
    entries: dict[ContainerId, Entry | None]
    foreign: dict[ContainerId, ExternalAllocation | None]
    leaving: dict[GpuUuid, Releasing | None]
    reservations: dict[str, Reservation | None]
    claims: dict[ClaimUid, PreparedClaim | None]
    # When it was noted, seconds since the epoch. Logs of earlier versions have neither this nor the next two.
    at_s: float | None = None
    unsought: dict[ContainerId, float | None] = {}
    processes: dict[ContainerId, FirstProcess | None] = {}  # of created containers


class _ChangedRecord(_LedgerRecord, frozen=True, tag="changed"):
    pass


class DecisionRecord(Struct, frozen=True, tag_field="kind", tag="decision"):
    """A request and its answer. at_s: seconds since the epoch; now: on the clock of the ledger's times."""

    at_s: float
    now: float
    container: Record
    answer: Record


class RepairRecord(Struct, frozen=True, tag_field="kind", tag="repaired"):
    """Root's word that a GPU was reset. due: what had asked for the reset. at_s: seconds since the epoch."""

    at_s: float
    gpu_uuid: str
    due: str


class CordonedRecord(Struct, frozen=True, tag_field="kind", tag="cordoned"):
    """A GPU that root took out of use, or that is in use again. by: who took it out of use. why: root's text.

    at_s: seconds since the epoch. ended: how it came back into use, or empty.
    """

    at_s: float
    gpu_uuid: str
    by: str
    why: str
    ended: str = ""


def answer_json(decision: Decision) -> dict[str, object]:
    """Return an answer as it is recorded and compared; a digest stands for the edits."""
    match decision:
        case Pass(edits, why):
            return {"decision": "pass", "reason": why, "edits_sha256": digest(edits)}
        case Refuse(reason):
            return {"decision": "refuse", "code": reason.code.value, "reason": reason.sentence}
        case Inject(edits, grant, rule, note):
            granted = {"gpu_uuids": list(grant.uuids), "mode": encode(grant.mode), "generation": grant.generation}
            return {"decision": "inject", "rule": rule, "note": note, "edits_sha256": digest(edits), **granted}


def digest(edits: Edits) -> str:
    """Return the SHA-256 of the edits of a container, in hexadecimal."""
    return hashlib.sha256(canonical(edits).encode()).hexdigest()


def ledger_record(ledger: Ledger, at_s: float) -> Record:
    return {"kind": "ledger", "at_s": at_s, **_changes(Ledger(), ledger)}


def changed_record(old: Ledger, new: Ledger, at_s: float) -> Record | None:
    """Return the record of how two ledgers differ, or None if they are equal. at_s: when, seconds since the epoch."""
    changes = _changes(old, new)
    return {"kind": "changed", "at_s": at_s, **changes} if any(changes.values()) else None


def decision_record(container: Container, decision: Decision, at_s: float, now: float) -> DecisionRecord:
    return DecisionRecord(at_s, now, container_json(container), answer_json(decision))


def container_json(container: Container) -> Record:
    """Return a container's record. A pending allocation of the kubelet is recorded as an invalid one that `waits`."""
    found = encode(container)
    if isinstance(container.kubelet, AllocationPending):
        return {**found, "kubelet": {**encode(container.kubelet), "waits": True}}
    return found


def container_of(found: Record) -> Container:
    """Return the container that was recorded. Raises: ValueError."""
    match found:
        case {"kubelet": {**kubelet}}:
            kind = "pending" if kubelet.pop("waits", False) else "invalid" if "fault" in kubelet else "allocated"
            found = {**found, "kubelet": {**kubelet, "kind": kind}}
    return decode(Container, found)


def _changes(old: Ledger, new: Ledger) -> dict[str, object]:
    # A log seldom has these two.
    seldom = {
        "unsought": _changed(old.unsought, new.unsought),
        "processes": _changed(processes_of_created(old), processes_of_created(new)),
    }
    return {
        "entries": _changed(old.entries, new.entries),
        "foreign": _changed(old.external, new.external),
        "leaving": _changed(old.releasing, new.releasing),
        "reservations": _changed(_by_id(old), _by_id(new)),
        "claims": _changed(old.claims, new.claims),
        **{name: each for name, each in seldom.items() if each},
    }


def processes_of_created(ledger: Ledger) -> Mapping[ContainerId, FirstProcess]:
    """Return the processes by which containers that were created do not lapse in time; of others no decision asks."""
    created = (id_ for id_, entry in ledger.entries.items() if entry.phase is GrantPhase.CREATED)
    return {id_: ledger.processes[id_] for id_ in created if id_ in ledger.processes}


def _changed(old: Mapping[K, V], new: Mapping[K, V]) -> Mapping[K, object]:
    fresh = {key: encode(value) for key, value in new.items() if old.get(key) is not value}
    return {**fresh, **dict.fromkeys(old.keys() - new.keys())}


def _updated(old: Mapping[K, V], found: Mapping[K, V | None]) -> Mapping[K, V]:
    """Return the map with what a record has as new, different or gone."""
    kept = {key: value for key, value in old.items() if key not in found}
    return kept | {key: value for key, value in found.items() if value is not None}


def _by_id(ledger: Ledger) -> Mapping[str, Reservation]:
    return {reservation_id(device): each for device, each in ledger.reservations.items()}


def _without(fields: Set[str], record: Record) -> Record:
    return {key: value for key, value in record.items() if key not in fields}


_AnyRecord = (
    NodeRecord
    | PolicyRecord
    | _LedgerRecord
    | _ChangedRecord
    | DecisionRecord
    | RepairRecord
    | CordonedRecord
    | CutRecord
    | LeftOutRecord
)


class Compared(Struct, frozen=True):
    """A decision of the log, and this version's decision on its request."""

    container: Container
    at: float
    recorded: Record
    now: Record

    @property
    def same(self) -> bool:
        """Return whether the two answers are equal but for their sentences."""
        return _without(_SENTENCES, self.recorded) == _without(_SENTENCES, self.now)


class PassedOver(Struct, frozen=True):
    """Decisions that the log does not have whole. container: empty where there are several. why: a clause.

    at_s: seconds since the epoch.
    """

    at_s: float
    namespace: str
    pod: str
    container: str
    decisions: int
    why: str


class Replay:
    """The replay of a log, record by record.

    read: parses a recorded policy. instead: a policy to use in place of all that were recorded.
    """

    def __init__(self, read: Callable[[str, str], Policy], instead: Policy | None = None) -> None:
        self._read = read
        self._instead = instead
        self._policy: Policy = instead or Policy.default()
        self._node = Node(number=0, inventory=Inventory(taken_at=0))
        self.ledger = Ledger()
        self._decided: set[ContainerId] = set()

    def take(self, record: object) -> Compared | PassedOver | None:
        """Replay one record. Return the comparison if it is a decision, or which decisions are passed over.

        Raises: ValueError: the record is not ours.
        """
        try:
            found = convert(record, _AnyRecord)
        except ValidationError as error:
            raise ValueError(f"this is not a record of an audit log: {error}") from None
        match found:
            case NodeRecord(node=node):
                self._node = decode(Node, _without(_FORMER_FIELDS, node))
            case PolicyRecord(source, text, fault):
                if self._instead is None:
                    self._policy = Policy.broken(fault) if fault else self._read(source, text)
            case _ChangedRecord():
                self._take_changes(found)
            case _LedgerRecord():
                self._take_ledger(found)
            case DecisionRecord():
                return self._decide(found)
            case CutRecord(at_s, cut, bytes=size):
                of, why = container_of(cut), f"its record was cut, as it would have had {size} bytes"
                return PassedOver(at_s, of.pod.namespace, of.pod.name, of.name, 1, why)
            case LeftOutRecord(at_s, namespace, pod, decisions):
                why = f"{decisions} in all were left out of the file, as the pod had its share of it"
                return PassedOver(
                    at_s, namespace, pod, "", decisions - decisions // 2, why
                )  # since the last such record
            case RepairRecord() | CordonedRecord():
                pass
        return None

    def _take_ledger(self, record: _LedgerRecord) -> None:
        """Apply a full ledger (at Synchronize or the start of a file), except entries that this replay decided."""
        kept = self._decided & record.entries.keys()
        ours = {id_: entry for id_, entry in self.ledger.entries.items() if id_ in kept}
        self.ledger = Ledger(MappingProxyType(ours))
        self._take_changes(record)

    def _take_changes(self, record: _LedgerRecord) -> None:
        for id_, entry in record.entries.items():
            self._take_entry(id_, entry)
        for name, reservation in record.reservations.items():
            if device := reserved_device(name):
                self._take_reservation(device, reservation)
        self.ledger = replace(
            self.ledger,
            claims=_updated(self.ledger.claims, record.claims),
            unsought=_updated(self.ledger.unsought, record.unsought),
            processes=_updated(self.ledger.processes, record.processes),
        )
        self.ledger = self.ledger.with_all_external(_updated(self.ledger.external, self._watched(record.foreign)))
        if self._instead is None or (not self._instead.fault and self._instead.handover.wait):
            # When a GPU was released, and when it was found unused, follows the recording, whichever pod held it.
            self.ledger = self.ledger.with_releasing(_updated(self.ledger.releasing, record.leaving))

    def _watched(
        self, found: Mapping[ContainerId, ExternalAllocation | None]
    ) -> Mapping[ContainerId, ExternalAllocation | None]:
        """Mark what the other policy's monitors open as watched; what the kubelet allocated was not recorded."""
        if self._instead is None:
            return found
        monitors = self._instead.foreign.monitors
        return {
            id_: each
            and replace(each, watched=(each.watched or each.uuids) if monitors.match(each.pod) else frozenset())
            for id_, each in found.items()
        }

    def _take_reservation(self, device: AllocatedDevice, reservation: Reservation | None) -> None:
        if reservation is None:
            self.ledger = self.ledger.without_reservations((device,))
        else:
            self.ledger = self.ledger.with_reservation(reservation)

    def _take_entry(self, id_: ContainerId, entry: Entry | None) -> None:
        ours = self.ledger.entries.get(id_)
        if entry is None:
            self.ledger = replace(self.ledger, entries=without(self.ledger.entries, {id_}))
        elif self._instead is None or id_ not in self._decided:
            self.ledger = self.ledger.with_entry(entry)
        elif ours is not None:
            # The entry's phase follows the recording, its grant follows the replay.
            self.ledger = self.ledger.with_entry(replace(entry, grant=ours.grant))

    def _decide(self, record: DecisionRecord) -> Compared:
        container, now = container_of(record.container), record.now
        settings = self._policy if not self._policy.fault else Policy.default()
        rules = Rules(settings.ledger.created_grace_s, self._node.inventory, grace_s=settings.handover.grace_s)
        self.ledger = apply(self.ledger, Ticked(now), rules)
        decision = decide(container, self._node, cleared_for(self.ledger, container, now), self._policy)
        if not isinstance(decision, Refuse):
            grant = decision.grant if isinstance(decision, Inject) else None
            self.ledger = apply(self.ledger, Created(now, container, grant), rules)
        self._decided.add(container.id)
        return Compared(container, record.at_s, record.answer, answer_json(decision))
