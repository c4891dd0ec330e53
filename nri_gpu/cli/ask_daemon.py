"""The client of the running daemon's control socket, and the reading of its answers."""

from __future__ import annotations

import errno
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from msgspec import convert
from msgspec.structs import replace

from nri_gpu.cordon.cordon_file import CordonError, kept_cordons
from nri_gpu.daemon.answers import CHANGES_NOTHING, FOR_ROOT, DaemonStatus, UnitStatus
from nri_gpu.domain.cordons import Cordons, marked
from nri_gpu.domain.errors import CommandError, Exit, fault_of
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigDevice
from nri_gpu.domain.health import Health, HealthState, Sign
from nri_gpu.domain.names import CONTROL_SOCKET, DEFAULT_OBSERVE, DEFAULT_STATE
from nri_gpu.domain.node import Inventory
from nri_gpu.policy.usage_settings import UsageSettings
from nri_gpu.records.kept_folder import kept_folder

TIMEOUT_S: Final = 5.0
RUNNING: Final = "is `nri-gpu run` running? `status` asks a running `nri-gpu observe`, too"
READ_BYTES: Final = 1 << 16
ANSWER_MAX: Final = 64 << 20  # bytes; a full node has some 200 kB
T = TypeVar("T")
G = TypeVar("G", Gpu, MigDevice)


def ask(path: Path, question: str, kind: type[T], timeout_s: float = TIMEOUT_S) -> T:
    """Return the daemon's answer to one question. Raises: OSError; ValueError, if it is no such answer.

    timeout_s: for each part of the answer, and twice that for all.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(f"{question}\n".encode())
        text = _read(connection, time.monotonic() + 2 * timeout_s)
    return parse_answer(text, kind)


def answering(state_dir: str | None, daemon: Path = DEFAULT_STATE, observer: Path = DEFAULT_OBSERVE) -> Path:
    """Return the folder of the daemon, or of the observer where no daemon listens and an observer does.

    state_dir: the only one to ask, of either, or None.
    """
    if state_dir:
        return Path(state_dir)
    return observer if not _listens(daemon) and _listens(observer) else daemon


def _listens(folder: Path) -> bool:
    """Return whether somebody listens there, or may: the question itself tells who has no permission."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        return connection.connect_ex(str(folder / CONTROL_SOCKET)) in (0, errno.EACCES, errno.EAGAIN)


def answer_of(state_dir: Path, question: str, read: Callable[[dict[str, object]], T], right: str = "be root") -> T:
    """Return what `read` makes of the daemon's answer. right: what else to do without permission.

    Raises: CommandError.
    """
    path = state_dir / CONTROL_SOCKET
    try:
        return read(ask(path, question, dict))
    except PermissionError:
        raise CommandError(Exit.PERMISSION, f"no permission for {path}: {right}") from None
    except (OSError, ValueError) as error:
        if FOR_ROOT in fault_of(error):
            raise CommandError(Exit.PERMISSION, f"no permission: {FOR_ROOT}; run it with sudo") from None
        if CHANGES_NOTHING in fault_of(error):
            raise CommandError(Exit.UNAVAILABLE, CHANGES_NOTHING) from None
        sentence = f"no answer from the daemon at {path}: {fault_of(error)}; {RUNNING}"
        raise CommandError(Exit.UNAVAILABLE, sentence) from None


def parse_answer(text: bytes, kind: type[T]) -> T:
    """Return the daemon's answer to a question. Raises: ValueError, if it is no such answer, or says what is wrong."""
    try:
        answer = json.loads(text)
    except RecursionError as error:
        raise ValueError("not a JSON object: nested too deep") from error
    if not isinstance(answer, dict) or "error" in answer:
        raise ValueError(answer.get("error") if isinstance(answer, dict) else "not a JSON object")
    return convert(answer, kind)


def _read(connection: socket.socket, until_s: float) -> bytes:
    """Read all that is sent. Raises: OSError; ValueError, if it is more than a daemon ever sends."""
    parts: list[bytes] = []
    size_bytes = 0
    while part := connection.recv(READ_BYTES):
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > ANSWER_MAX:
            raise ValueError(f"an answer of more than {ANSWER_MAX >> 20} MiB")
        if time.monotonic() > until_s:
            raise TimeoutError(f"the answer ended after {size_bytes} bytes")
    return b"".join(parts)


def daemon_status(state_dir: Path) -> DaemonStatus | None:
    """Return the `status` of the running daemon, or None if none runs, or we may not ask it."""
    try:
        return ask(state_dir / CONTROL_SOCKET, "status", DaemonStatus)
    except (OSError, ValueError):
        return None


def overrides_of(status: DaemonStatus | None) -> dict[str, str | bool | int | float]:
    """Return the options of the running daemon's command line that override its policy file."""
    return {key: value for key, value in (status.options if status else {}).items() if key != "topology"}


def with_health(inventory: Inventory, status: DaemonStatus) -> Inventory:
    """Return the inventory with the GPUs' health from `status`, or unchanged if a health state is unknown to us."""
    known = {each.uuid: each for each in status.gpus}
    try:
        gpus = [_reported(gpu, known) for gpu in inventory.gpus]
    except ValueError:
        return inventory
    return replace(inventory, gpus=tuple(gpus))


def with_cordons(inventory: Inventory, status: DaemonStatus | None, settings: UsageSettings) -> Inventory:
    """Return this machine's inventory with the GPUs out of use that root took out of use.

    The daemon knows them, else the file. Whoever may not read that is told so, and sees none.
    """
    if status:
        found = frozenset(GpuUuid(each.uuid) for each in status.gpus if each.cordoned)
        return marked(inventory, Cordons(found, unknown=bool(status.cordon_fault)))
    try:
        return marked(inventory, kept_cordons(kept_folder(settings)))
    except CordonError:
        print("nri-gpu: only root sees which GPUs are taken out of use", file=sys.stderr)
        return inventory


def _reported(gpu: G, known: Mapping[str, UnitStatus]) -> G:
    """Return a GPU or MIG device as the daemon reports it, or as it is known without the daemon."""
    if isinstance(gpu, Gpu):
        gpu = replace(gpu, mig=tuple(_reported(device, known) for device in gpu.mig))
    if (found := known.get(gpu.uuid)) is None:
        return gpu
    state = HealthState(found.health.state)
    health = Health(state, found.health.since_s or 0.0, found.health.why, found.health.changes)
    waits = Sign.FABRIC_NOT_READY in found.health.signs
    why = found.unavailable if not health.grantable else found.withheld if waits else ""
    return replace(gpu, health=health, unavailable=why or gpu.unavailable)
