"""The state folder: the mark's key, the ledger as people read it, one daemon at a time."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from nri_gpu.allocation.grant import KEY_BYTES
from nri_gpu.allocation.ledger import Entry, ExternalAllocation, GrantPhase, Ledger, Releasing, Reservation
from nri_gpu.allocation.reservations import reservation_id, reserved_device
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.container import ContainerId, PodId, PodUid
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.errors import NriGpuError
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.names import LEDGER
from nri_gpu.system.log_once import LogOnce
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.system.storage import NotPrivateError, lock_holder, open_lock, read_private, text_of, try_lock, write_whole

LEDGER_DELAY_S: Final = 0.05
LEDGER_SCHEMA: Final = "nri-gpu/ledger/v1"


class StateError(NriGpuError):
    """The state folder cannot be used. Says which and why. taken: another daemon has it."""

    def __init__(self, sentence: str, *, taken: bool = False) -> None:
        super().__init__(sentence)
        self.taken = taken


class StateFolder:
    """A folder of mode 0700, `/run/nri-gpu` by default. On /run it is as young as the boot, and so is the key.

    key_fault: why a key that was there had to be made anew; empty where it had not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key_fault = ""
        self._lock: int | None = None
        self._lines: dict[ContainerId, tuple[Entry, str]] = {}  # of ledger.json

    def open(self) -> None:
        """Make and lock it. Raises: StateError when that fails, or another daemon holds it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            lock = open_lock(self.path / "lock")
        except OSError as error:
            raise StateError(
                f"state folder {self.path} cannot be used: {error.strerror}; run as root, or give --state-dir"
            ) from error
        if not try_lock(lock):
            holder = lock_holder(lock) or self._holder()
            os.close(lock)
            raise StateError(
                f"another nri-gpu{holder} runs with state folder {self.path}; two of them would refuse each other's "
                "containers: stop that one, or give --state-dir and --index",
                taken=True,
            )
        self._lock = lock
        # Only for the sentence above.
        with suppress(OSError):
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())

    def close(self) -> None:
        """Let another daemon have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def key(self) -> bytes:
        """The mark's key, made when there is none that can be used. Raises: StateError."""
        file = self.path / "key"
        try:
            key = self._kept_key(file)
            if key is None:
                key = os.urandom(KEY_BYTES)
                write_whole(file, key)
        except OSError as error:
            raise StateError(f"key {file} cannot be read or made: {error.strerror}") from error
        return key

    def _kept_key(self, file: Path) -> bytes | None:
        try:
            key = read_private(file, KEY_BYTES + 1)
        except FileNotFoundError:
            return None
        except NotPrivateError as error:
            self.key_fault = str(error.strerror)
            return None
        except OSError as error:
            self.key_fault = f"it cannot be opened: {error.strerror}"
            return None
        if len(key) != KEY_BYTES:
            self.key_fault = f"it is not {KEY_BYTES} bytes long"
            return None
        return key

    def write_ledger(self, ledger: Ledger) -> None:
        """`ledger.json`, for people, other verbs and the next daemon; the marks are the truth. Raises: OSError."""
        write_whole(self.path / LEDGER, self._ledger_text(ledger).encode())

    def _ledger_text(self, ledger: Ledger) -> str:
        """A line for each grant; fields are only ever added.

        The event loop waits for this, so lines are kept: few change from one to the next.
        """
        known, self._lines = self._lines, {}
        for id_, entry in ledger.entries.items():
            kept = known.get(id_)
            self._lines[id_] = kept if kept and kept[0] is entry else (entry, json.dumps(_grant_json(entry)))
        reservations = (json.dumps(_reservation_json(each)) for each in ledger.reservations.values())
        grants = _listed((*(line for _, line in self._lines.values()), *reservations))
        foreign = _listed(json.dumps(_foreign_json(other)) for other in ledger.external.values())
        leaving = _listed(json.dumps(_leaver_json(uuid, leaver)) for uuid, leaver in ledger.releasing.items())
        lists = f' "grants": {grants},\n "foreign": {foreign},\n "leaving": {leaving}'
        return f'{{\n "schema": "{LEDGER_SCHEMA}",\n{lists}\n}}\n'

    def write(self, name: str, content: bytes) -> None:
        """A file of the folder, whole or not at all. Raises: OSError."""
        write_whole(self.path / name, content)

    def _holder(self) -> str:
        pid = (text_of(self.path / "lock") or "").strip()
        return f" (pid {pid})" if pid else ""


class LedgerFile:
    """Writes `ledger.json` a moment after the ledger changed: changes come in bursts, and the file is for people."""

    def __init__(self, folder: StateFolder, state: NodeState) -> None:
        self._folder = folder
        self._state = state
        self._timer: asyncio.TimerHandle | None = None
        self._faults = LogOnce()
        self._closed = False
        state.subscribe(self._changed, Changed.LEDGER)

    def close(self) -> None:
        """Write it now, and never again: the folder may be another daemon's from here on."""
        self._closed = True
        if self._timer:
            self._timer.cancel()
        self._write()

    def _changed(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(LEDGER_DELAY_S, self._write)

    def _write(self) -> None:
        self._timer = None
        try:
            self._folder.write_ledger(self._state.ledger)
        except OSError as error:
            self._faults.warning("ledger.json not written; the grants on the containers hold", str(error))
        else:
            self._faults.clear()


def _listed(lines: Iterable[str]) -> str:
    text = ",\n  ".join(lines)
    return f"[\n  {text}\n ]" if text else "[]"


def _grant_json(entry: Entry) -> dict[str, Any]:
    grant = entry.grant
    return {
        "namespace": grant.namespace,
        "pod": grant.pod_name,
        "pod_uid": grant.pod_uid,
        "container": grant.container_name,
        "container_id": grant.container_id,
        "phase": entry.phase.value,
        "mode": grant.mode.value if grant.mode else "none",
        "gpu_uuids": list(grant.uuids),
        "driver_generation": grant.generation,
    }


def _reservation_json(reservation: Reservation) -> dict[str, Any]:
    """The fields of a grant that was created and has not started."""
    return {
        "namespace": reservation.namespace,
        "pod": reservation.pod_name,
        "pod_uid": reservation.pod_uid,
        "container": reservation.container_name,
        "container_id": reservation_id(reservation.device),
        "phase": GrantPhase.CREATED.value,
        "mode": reservation.mode.value,
        "gpu_uuids": [reservation.device.uuid],
        "driver_generation": "-",
    }


def _leaver_json(uuid: GpuUuid, leaver: Releasing) -> dict[str, Any]:
    """since_s: seconds on the boot's monotonic clock."""
    return {
        "gpu_uuid": uuid,
        "pod": leaver.pod,
        "pod_uid": leaver.pod_uid,
        "since_s": leaver.since,
        "grace_s": leaver.grace_s,
    }


def _foreign_json(other: ExternalAllocation) -> dict[str, Any]:
    """container: its name, where its device numbers became those of other GPUs than it was granted; else empty."""
    uuids = sorted(other.uuids)
    return {"container_id": other.container_id, "pod": other.pod, "container": other.container, "gpu_uuids": uuids}


BYTES_MAX: Final = 64 * 1024 * 1024
GRACE_MAX_S: Final = 86_400.0


def former_ledger(file: Path, now: float) -> Ledger:
    """What the file tells, or an empty ledger. now: seconds on the boot's monotonic clock.

    Raises: ValueError: it is not a ledger; OSError: it is there and cannot be read.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(BYTES_MAX)
    except FileNotFoundError:
        return Ledger()
    try:
        raw = json.loads(text)
        if raw["schema"] != LEDGER_SCHEMA:
            raise ValueError(f"its schema is {raw['schema']}")
        held = [each for grant in raw["grants"] if (each := _held(grant))]
        leaving = {GpuUuid(_text(each, "gpu_uuid")): _leaver(each, now) for each in raw.get("leaving", ())}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not what nri-gpu writes: {error!r}") from error
    entries = {each.grant.container_id: each for each in held if isinstance(each, Entry)}
    reservations = {each.device: each for each in held if isinstance(each, Reservation)}
    return Ledger(entries, {}, leaving, {}, reservations)


def _held(raw: Mapping[str, Any]) -> Entry | Reservation | None:
    """One grant or reservation; None for a grant that holds nothing."""
    phase, mode = GrantPhase(raw["phase"]), raw["mode"]
    if phase is GrantPhase.LAPSED or mode == "none":
        return None
    id_ = ContainerId(_text(raw, "container_id"))
    if device := reserved_device(id_):
        # When it began is not written, and whoever carries it over gives it an end.
        return Reservation(
            device=device,
            mode=Mode(mode),
            namespace=_text(raw, "namespace"),
            pod_name=_text(raw, "pod"),
            since=0.0,
            until=None,
            pod_uid=PodUid(_text(raw, "pod_uid")),
            container_name=_text(raw, "container"),
        )
    grant = Grant(
        container_id=id_,
        container_name=_text(raw, "container"),
        pod_id=PodId(""),
        pod_uid=PodUid(_text(raw, "pod_uid")),
        pod_name=_text(raw, "pod"),
        namespace=_text(raw, "namespace"),
        uuids=_uuids(raw["gpu_uuids"]),
        mode=Mode(mode),
        generation=_text(raw, "driver_generation"),
    )
    return Entry(grant, phase, 0.0)


def _leaver(raw: Mapping[str, Any], now: float) -> Releasing:
    """A time to come was edited by hand, and would put off the end of the grace."""
    since, grace_s = float(raw["since_s"]), float(raw["grace_s"])
    if not (math.isfinite(since) and 0 <= grace_s <= GRACE_MAX_S):
        raise ValueError(f"a GPU that was left at {since} s with a grace of {grace_s} s")
    return Releasing(PodUid(_text(raw, "pod_uid")), _text(raw, "pod"), min(since, now), grace_s)


def _uuids(raw: object) -> tuple[GpuUuid, ...]:
    if not isinstance(raw, list) or not all(isinstance(each, str) for each in raw):
        raise TypeError("gpu_uuids is no list of texts")
    return tuple(map(GpuUuid, raw))


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is no text")
    return value
