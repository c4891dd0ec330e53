"""`ledger.json`: the ledger for people, for other verbs and for the next daemon. The signed grants are the truth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from nri_gpu.domain.container import ContainerId, FirstProcess, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.ledger.holders import DriverDevice, ExternalAllocation, Releasing, Reservation
from nri_gpu.ledger.ledger import Entry, GrantPhase, Ledger, Live
from nri_gpu.ledger.reservations import reservation_id, reserved_device
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.storage import read_bytes, write_whole
from nri_gpu.system.tasks import LogOnce

LEDGER_SCHEMA: Final = "nri-gpu/ledger/v1"
NO_MODE: Final = "none"
ADMIN: Final = "admin"  # of a container that monitors GPUs: it holds none of them
# Long enough that the creation and the start of a container make one write, which comes after both.
DELAY_S: Final = 0.25
SOON_S: Final = 0.05
BYTES_MAX: Final = 64 * 1024 * 1024
GRACE_MAX_S: Final = 86_400.0


class HolderLine(Struct, frozen=True, kw_only=True):
    """A grant; or a reservation, as a grant that was created and has not started. mode: a Mode, `none` or `admin`."""

    namespace: str
    pod: str
    pod_uid: PodUid
    container: str
    container_id: ContainerId
    phase: GrantPhase
    mode: str
    gpu_uuids: tuple[GpuUuid, ...]
    driver_generation: str


class GrantLine(HolderLine, frozen=True, kw_only=True):
    """A holder in the file."""

    since_s: float | None = None  # on the boot's monotonic clock, in seconds; None in a file of an earlier version
    lost: bool = False  # its phase is, which an earlier version would not read
    pod_id: PodId = PodId("")  # of the sandbox
    pod_gone: bool = False  # the sandbox is gone


class ExternalLine(Struct, frozen=True, kw_only=True):
    """An external allocation."""

    container_id: ContainerId
    pod: str
    container: str  # its name, if its device numbers became those of other GPUs; else empty
    gpu_uuids: tuple[GpuUuid, ...]
    watched: tuple[GpuUuid, ...] = ()  # of its GPUs, those that it opens as a monitor, and does not hold
    regained: tuple[GpuUuid, ...] = ()  # GPUs that it holds again since it was a monitor


class ReleasingLine(Struct, frozen=True, kw_only=True):
    """A GPU that was just released. since_s: seconds on the boot's monotonic clock. first_started: see `Releasing`."""

    gpu_uuid: GpuUuid
    pod: str
    pod_uid: PodUid
    since_s: float
    grace_s: Annotated[float, Meta(ge=0, le=GRACE_MAX_S)]
    first_started: int | None = None


class LedgerDocument(Struct, frozen=True, kw_only=True):
    """The file; fields are only ever added."""

    schema: Literal["nri-gpu/ledger/v1"]
    grants: tuple[GrantLine, ...]
    foreign: tuple[ExternalLine, ...] = ()  # external allocations
    leaving: tuple[ReleasingLine, ...] = ()  # GPUs that were just released
    processes: Mapping[ContainerId, FirstProcess] = {}  # the first of each container that was started
    opened: tuple[Live, ...] = ()  # what such a container can open
    prepared: tuple[DriverDevice, ...] = ()  # by NVIDIA's DRA driver


def write_ledger(file: Path, ledger: Ledger) -> None:
    """Write the file, with a line for each grant. Raises: OSError."""
    # The next daemon comes to know by itself whom the list lacks and nobody has looked for.
    lines = ((id_, _grant_line(entry)) for id_, entry in ledger.entries.items())
    entries = (replace(line, lost=line.lost and id_ not in ledger.unsought) for id_, line in lines)
    grants = (*entries, *map(_grant_line, ledger.reservations.values()))
    foreign = (
        ExternalLine(
            container_id=each.container_id,
            pod=each.pod,
            container=each.container,
            gpu_uuids=tuple(sorted(each.uuids)),
            watched=tuple(sorted(each.watched)),
            regained=tuple(sorted(each.regained)),
        )
        for each in ledger.external.values()
    )
    leaving = (
        ReleasingLine(
            gpu_uuid=uuid,
            pod=each.pod,
            pod_uid=each.pod_uid,
            since_s=each.since,
            grace_s=each.grace_s,
            first_started=each.first_started,
        )
        for uuid, each in ledger.releasing.items()
    )
    opened = [each for id_, each in ledger.live.items() if id_ in ledger.processes]
    opened += [replace(ledger.live[id_], lost_since=None) for id_ in ledger.unsought.keys() & ledger.live.keys()]
    lists = f' "grants": {_lines(grants)},\n "foreign": {_lines(foreign)},\n "leaving": {_lines(leaving)}'
    lists += f',\n "prepared": {_lines(ledger.prepared.values())}'
    lists += f',\n "opened": {_lines(opened)},\n "processes": {msgspec.json.encode(ledger.processes).decode()}'
    write_whole(file, f'{{\n "schema": "{LEDGER_SCHEMA}",\n{lists}\n}}\n'.encode())


def read_ledger(file: Path, now: float) -> Ledger:
    """Return the grants, reservations and releasing GPUs in the file; a missing file is an empty ledger.

    now: seconds on the boot's monotonic clock. Raises: ValueError, if it is no ledger; OSError, if it cannot be read.
    """
    try:
        text = read_bytes(file, BYTES_MAX)
    except FileNotFoundError:
        return Ledger()
    try:
        return _ledger_of(msgspec.json.decode(text, type=LedgerDocument), now)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not what nri-gpu writes: {error}") from error


def _ledger_of(document: LedgerDocument, now: float) -> Ledger:
    """Return the document's ledger. Raises: ValueError: an unknown mode."""
    entries: dict[ContainerId, Entry] = {}
    reservations = {}
    for line in document.grants:
        if line.phase is GrantPhase.LAPSED or line.mode in (NO_MODE, ADMIN):
            continue  # it holds nothing
        # A time in the future was edited by hand.
        since = now if line.since_s is None else min(line.since_s, now)
        if device := reserved_device(line.container_id):
            # Whoever carries it over gives it an end.
            reservations[device] = Reservation(
                device=device,
                mode=Mode(line.mode),
                namespace=line.namespace,
                pod_name=line.pod,
                since=since,
                until=None,
                pod_uid=line.pod_uid,
                pod_id=line.pod_id,
                container_name=line.container,
                pod_gone=line.pod_gone,
            )
        else:
            phase = GrantPhase.LOST if line.lost else line.phase
            entries[line.container_id] = Entry(_grant(line), phase, since, pod_gone=line.pod_gone)
    # A time in the future would put off the end of the grace.
    releasing = {
        each.gpu_uuid: Releasing(
            each.pod_uid, each.pod, min(each.since_s, now), each.grace_s, first_started=each.first_started
        )
        for each in document.leaving
    }
    live = {each.container_id: each for each in document.opened}
    # The numbers tell what each container opens; only this file tells that its pod was a monitor.
    external = {
        each.container_id: ExternalAllocation(
            each.container_id,
            live[each.container_id].pod_id,
            each.pod,
            frozenset(each.gpu_uuids),
            each.container,
            live[each.container_id].container,
            frozenset(each.watched),
            frozenset(each.regained),
        )
        for each in document.foreign
        if each.container_id in live and (each.watched or each.regained)
    }
    prepared = {each.id: replace(each, unlisted_since=None) for each in document.prepared}  # the next list tells
    return Ledger(entries, external, releasing, live, reservations, prepared=prepared, processes=document.processes)


class LedgerFile:
    """The writer of the file, a moment after the ledger changed: changes come in bursts, and the file is for people.

    delay_s: from a change to the file. soon_s: the same for what is written nowhere else.
    """

    def __init__(self, file: Path, state: NodeState, *, delay_s: float = DELAY_S, soon_s: float = SOON_S) -> None:
        self._file = file
        self._delay_s = delay_s
        self._soon_s = soon_s
        self._state = state
        self._timer: asyncio.TimerHandle | None = None
        self._faults = LogOnce()
        self._closed = False
        self._only_here = _only_here(state.ledger)
        state.then(self._changed, Changed.LEDGER)

    def close(self) -> None:
        """Write the file now, and never again: the folder may be another daemon's from here on."""
        self._closed = True
        if self._timer:
            self._timer.cancel()
        self._write()

    def _changed(self) -> None:
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        before, self._only_here = self._only_here, _only_here(self._state.ledger)
        at = loop.time() + (self._delay_s if self._only_here == before else self._soon_s)
        if self._timer and self._timer.when() <= at:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = loop.call_at(at, self._write)

    def _write(self) -> None:
        self._timer = None
        with self._faults.guard("ledger.json not written; signed grants on containers stay valid"):
            write_ledger(self._file, self._state.ledger)


def _only_here(ledger: Ledger) -> object:
    """Return what only this file can restore for the next daemon: the runtime reports none of it."""
    return ledger.reservations, ledger.releasing, ledger.processes, ledger.lost, ledger.prepared


def _lines(each: Iterable[Struct]) -> str:
    text = ",\n  ".join(msgspec.json.encode(line).decode() for line in each)
    return f"[\n  {text}\n ]" if text else "[]"


def holder_line(holder: Entry | Reservation) -> HolderLine:
    """Return a grant or a reservation as it is published."""
    if isinstance(holder, Reservation):
        return HolderLine(
            namespace=holder.namespace,
            pod=holder.pod_name,
            pod_uid=holder.pod_uid,
            container=holder.container_name,
            container_id=ContainerId(reservation_id(holder.device)),
            phase=GrantPhase.CREATED,
            mode=holder.mode.value,
            gpu_uuids=(holder.device.uuid,),
            driver_generation="-",
        )
    grant = holder.grant
    return HolderLine(
        namespace=grant.namespace,
        pod=grant.pod_name,
        pod_uid=grant.pod_uid,
        container=grant.container_name,
        container_id=grant.container_id,
        phase=holder.phase,
        mode=grant.mode.value if grant.mode else ADMIN if grant.uuids else NO_MODE,
        gpu_uuids=grant.uuids,
        driver_generation=grant.generation,
    )


def _grant_line(holder: Entry | Reservation) -> GrantLine:
    line = GrantLine(**asdict(holder_line(holder)), since_s=holder.since)
    if isinstance(holder, Reservation):
        return replace(line, pod_id=holder.pod_id, pod_gone=holder.pod_gone)
    phase = GrantPhase.RUNNING if holder.lost else holder.phase
    return replace(line, phase=phase, lost=holder.lost, pod_id=holder.grant.pod_id, pod_gone=holder.pod_gone)


def _grant(line: GrantLine) -> Grant:
    return Grant(
        container_id=line.container_id,
        container_name=line.container,
        pod_id=line.pod_id,
        pod_uid=line.pod_uid,
        pod_name=line.pod,
        namespace=line.namespace,
        uuids=line.gpu_uuids,
        mode=Mode(line.mode),
        generation=line.driver_generation,
    )
