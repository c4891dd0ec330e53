"""Asks the running daemon over its control socket, and reads its answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.domain.gpu import Gpu
from nri_gpu.domain.health import Health, HealthState
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.domain.node import Inventory

TIMEOUT_S: Final = 5.0
READ_BYTES: Final = 1 << 16


def ask(path: Path, question: str) -> Mapping[str, Any]:
    """The daemon's answer to one question. Raises: OSError; ValueError: it is no answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(f"{question}\n".encode())
        answer = json.loads(b"".join(iter(lambda: connection.recv(READ_BYTES), b"")))
    if not isinstance(answer, dict) or "error" in answer:
        raise ValueError(answer.get("error") if isinstance(answer, dict) else "not a JSON object")
    return answer


def daemon_status(state_dir: Path) -> Mapping[str, Any]:
    """The `status` of the running daemon; empty where none runs, or we may not ask it."""
    try:
        return ask(state_dir / CONTROL_SOCKET, "status")
    except (OSError, ValueError):
        return {}


def with_health(inventory: Inventory, status: Mapping[str, Any]) -> Inventory:
    """The inventory with the GPUs' health from a daemon's `status`; unchanged where that cannot be read."""
    try:
        known = {str(each["uuid"]): each for each in status["gpus"]}
        gpus = tuple(_gpu_with_health(gpu, known) for gpu in inventory.gpus)
    except (ValueError, KeyError, TypeError):
        return inventory
    return replace(inventory, gpus=gpus)


def _gpu_with_health(gpu: Gpu, reported: Mapping[str, Mapping[str, Any]]) -> Gpu:
    mig = []
    for device in gpu.mig:
        health, unavailable = _health(reported.get(device.uuid), device.health, device.unavailable)
        mig.append(replace(device, health=health, unavailable=unavailable))
    health, unavailable = _health(reported.get(gpu.uuid), gpu.health, gpu.unavailable)
    return replace(gpu, health=health, unavailable=unavailable, mig=tuple(mig))


def _health(reported: Mapping[str, Any] | None, health: Health, unavailable: str) -> tuple[Health, str]:
    """What the daemon reports about one GPU or MIG device; if nothing, what is known without it."""
    if reported is None:
        return health, unavailable
    found = reported["health"]
    health = Health(HealthState(found["state"]), found["since_s"] or 0.0, str(found["why"]), int(found["changes"]))
    return health, unavailable if health.grantable else str(reported["unavailable"])


class SnapshotAge(Struct, frozen=True):
    """The daemon's snapshot. age_s: seconds since NVML last confirmed it; None if it never did."""

    number: int
    age_s: float | None

    @property
    def text(self) -> str:
        """For a headline."""
        age = "not confirmed yet" if self.age_s is None else f"{self.age_s:.0f} s old"
        return f"the daemon's snapshot is number {self.number}, {age}"


def snapshot_of(status: Mapping[str, Any]) -> SnapshotAge | None:
    """The snapshot of a daemon's `status`; None where that is empty or has none."""
    try:
        node = status["node"]
        age_s = node["inventory_age_s"]
        return SnapshotAge(int(node["inventory_number"]), None if age_s is None else float(age_s))
    except (ValueError, KeyError, TypeError):
        return None
