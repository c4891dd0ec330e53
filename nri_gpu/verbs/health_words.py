"""How the health of GPUs is shown, and asked of a running daemon: only who listens knows of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_gpu.allocation.place import why_not
from nri_gpu.domain.gpu import ComputeMode, Gpu, Inventory, Unit, whole
from nri_gpu.domain.health import Health, State
from nri_gpu.runtime.state import CONTROL_SOCKET
from nri_gpu.verbs.asking import ask

# Shared by containers, only the first of them could compute, unless an MPS daemon is what has the GPU.
_FOR_ONE: Final = (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.EXCLUSIVE_THREAD)


def state_of(unit: Unit) -> str:
    """Why it cannot be granted; else `ok`, and what else there is to say of it."""
    if why := why_not(unit):
        return why
    gpu = whole(unit)
    words = [gpu.health.state.value] if gpu.health.state is not State.HEALTHY else []
    words += [sign.value for sign in gpu.signs]
    if unit is gpu and gpu.compute_mode in _FOR_ONE:
        words.append(gpu.compute_mode.value)
    return ", ".join(["ok", *words])


class Snapshot(Struct, frozen=True):
    """What a running daemon goes by. age_s: seconds since its source last confirmed it; None where it never did."""

    number: int
    age_s: float | None

    @property
    def words(self) -> str:
        """For people."""
        age = "not confirmed yet" if self.age_s is None else f"{self.age_s:.0f} s old"
        return f"the daemon's snapshot is number {self.number}, {age}"


def told(inventory: Inventory, state_dir: Path) -> tuple[Inventory, Snapshot | None]:
    """With what the daemon knows of the GPUs' health; as it is where there is none to ask."""
    try:
        status = ask(state_dir / CONTROL_SOCKET, "status")
        said = {str(each["uuid"]): each for each in status["gpus"]}
        gpus = tuple(_told(gpu, said.get(gpu.uuid)) for gpu in inventory.gpus)
        age_s = status["node"]["inventory_age_s"]
        snapshot = Snapshot(int(status["node"]["inventory_number"]), None if age_s is None else float(age_s))
    except (OSError, ValueError, KeyError, TypeError):
        return inventory, None
    return replace(inventory, gpus=gpus), snapshot


def _told(gpu: Gpu, said: Mapping[str, Any] | None) -> Gpu:
    if said is None:
        return gpu
    found = said["health"]
    health = Health(State(found["state"]), found["since_s"] or 0.0, str(found["why"]), int(found["changes"]))
    unavailable = gpu.unavailable if health.grantable else str(said["unavailable"])
    return replace(gpu, health=health, unavailable=unavailable)


def health_lines(gpus: list[Mapping[str, Any]], now: float) -> Iterator[str]:
    """Of `status`: one line for each GPU that is, or was, not well. now: seconds since the epoch."""
    for gpu in gpus:
        health = gpu.get("health") or {}
        if gpu["kind"] != "gpu" or not (health.get("changes") or health.get("signs")):
            continue
        line = f"GPU {gpu['place']} is {health['state']}"
        if since := health["since_s"]:
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since))
            verb = "recovered from" if health["state"] == State.HEALTHY else "because of"
            line += f" since {at}, {verb}: {health['why']}; its state changed {health['changes']} times"
        yield line + (f"; shows {', '.join(health['signs'])}" if health["signs"] else "")
