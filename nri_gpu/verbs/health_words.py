"""How the health of GPUs is shown, and asked of a running daemon: only who listens knows of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nri_gpu.allocation.place import why_not
from nri_gpu.domain.gpu import Gpu, Inventory, Unit, health_of, whole
from nri_gpu.domain.health import Health, State
from nri_gpu.runtime.state import CONTROL_SOCKET
from nri_gpu.verbs.asking import ask


def state_of(unit: Unit) -> str:
    """Why it cannot be granted; else `ok`, and what else there is to say of it."""
    if why := why_not(unit):
        return why
    health = health_of(unit)
    words = [health.state.value] if health.state is not State.HEALTHY else []
    words += [sign.value for sign in whole(unit).signs]
    return ", ".join(["ok", *words])


def told(inventory: Inventory, state_dir: Path) -> Inventory:
    """With what the daemon knows of the GPUs' health; as it is where there is none to ask."""
    try:
        said = {str(each["uuid"]): each for each in ask(state_dir / CONTROL_SOCKET, "status")["gpus"]}
        gpus = tuple(_told(gpu, said) for gpu in inventory.gpus)
    except (OSError, ValueError, KeyError):
        return inventory
    return replace(inventory, gpus=gpus)


def _told(gpu: Gpu, said: Mapping[str, Mapping[str, Any]]) -> Gpu:
    mig = []
    for device in gpu.mig:
        health, unavailable = _known(said.get(device.uuid), device.health, device.unavailable)
        mig.append(replace(device, health=health, unavailable=unavailable))
    health, unavailable = _known(said.get(gpu.uuid), gpu.health, gpu.unavailable)
    return replace(gpu, health=health, unavailable=unavailable, mig=tuple(mig))


def _known(said: Mapping[str, Any] | None, health: Health, unavailable: str) -> tuple[Health, str]:
    """What the daemon says of one, or what is known without it."""
    if said is None:
        return health, unavailable
    found = said["health"]
    health = Health(State(found["state"]), found["since_s"] or 0.0, str(found["why"]), int(found["changes"]))
    return health, unavailable if health.grantable else str(said["unavailable"])


def health_lines(gpus: list[Mapping[str, Any]], now: float) -> Iterator[str]:
    """Of `status`: one line for each GPU or MIG device that is, or was, not well. now: seconds since the epoch."""
    of_gpus = {gpu["place"]: gpu.get("health") or {} for gpu in gpus if gpu["kind"] == "gpu"}
    for unit in gpus:
        health, part = unit.get("health") or {}, unit["kind"] != "gpu"
        if part and health == of_gpus.get(unit["place"].partition(":")[0]):
            continue  # what a MIG device has of its GPU is said of the GPU
        signs = [] if part else health.get("signs") or []
        if not (health.get("changes") or signs):
            continue
        line = f"{'MIG device' if part else 'GPU'} {unit['place']} is {health['state']}"
        if since := health["since_s"]:
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since))
            verb = "recovered from" if health["state"] == State.HEALTHY else "because of"
            line += f" since {at}, {verb}: {health['why']}; its state changed {health['changes']} times"
        yield line + (f"; shows {', '.join(signs)}" if signs else "")
