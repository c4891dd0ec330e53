"""How the health of GPUs is shown, and asked of a running daemon: only who listens knows of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nri_gpu.allocation.place import why_not
from nri_gpu.domain.gpu import Gpu, Inventory, Unit, whole
from nri_gpu.domain.health import Health, State
from nri_gpu.runtime.state import CONTROL_SOCKET
from nri_gpu.verbs.asking import ask


def state_of(unit: Unit) -> str:
    """Why it cannot be granted; else `ok`, and what else there is to say of it."""
    if why := why_not(unit):
        return why
    gpu = whole(unit)
    words = [gpu.health.state.value] if gpu.health.state is not State.HEALTHY else []
    words += [sign.value for sign in gpu.signs]
    return ", ".join(["ok", *words])


def asked(state_dir: Path) -> Mapping[str, Any] | None:
    """What the daemon says of itself; None where there is none to ask."""
    try:
        return ask(state_dir / CONTROL_SOCKET, "status")
    except (OSError, ValueError):
        return None


def told(inventory: Inventory, said: Mapping[str, Any]) -> Inventory:
    """With what the daemon knows of the GPUs' health; as it is where it says nothing that can be understood."""
    try:
        known = {str(each["uuid"]): each for each in said["gpus"]}
        gpus = tuple(_told(gpu, known.get(gpu.uuid)) for gpu in inventory.gpus)
    except (ValueError, KeyError, TypeError):
        return inventory
    return replace(inventory, gpus=gpus)


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
