"""How the health of GPUs is shown, and asked of a running daemon: only who listens knows of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from nri_gpu.allocation.place import why_not
from nri_gpu.domain.gpu import Gpu, Inventory, Unit, health_of, whole
from nri_gpu.domain.health import Health, State
from nri_gpu.runtime.report import health_json, place_json
from nri_gpu.runtime.state import CONTROL_SOCKET
from nri_gpu.verbs.asking import ask

SHOWN: Final = 10  # transitions for people; `-o json` has more


def state_of(unit: Unit) -> str:
    """Why it cannot be granted; else `ok`, and what else there is to say of it."""
    if why := why_not(unit):
        return why
    health = health_of(unit)
    words = [health.state.value] if health.state is not State.HEALTHY else []
    words += [sign.value for sign in whole(unit).signs]
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
        gpus = tuple(_told(gpu, known) for gpu in inventory.gpus)
    except (ValueError, KeyError, TypeError):
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


def gpu_lines(inventory: Inventory) -> Iterator[str]:
    """Of `gpus`: the same as of `status`."""
    return health_lines([{**place_json(unit), "health": health_json(unit)} for unit in inventory.units])


def health_lines(gpus: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of `status`: one line for each GPU or MIG device that is, or was, not well."""
    of_gpus = {gpu["place"]: gpu.get("health") or {} for gpu in gpus if gpu["kind"] == "gpu"}
    for unit in gpus:
        health, part = unit.get("health") or {}, unit["kind"] != "gpu"
        if part and health == of_gpus.get(unit["place"].partition(":")[0]):
            continue  # what a MIG device has of its GPU is said of the GPU
        signs = [] if part else health.get("signs") or []
        if not (health.get("changes") or signs):
            continue
        name = f"{'MIG device' if part else 'GPU'} {unit['place']}"
        if not health.get("changes") and health["state"] == State.HEALTHY:  # as it is, too, where nobody judged
            yield f"{name} shows {', '.join(signs)}"
            continue
        line = f"{name} is {health['state']}"
        if since := health["since_s"]:
            verb = "recovered from" if health["state"] == State.HEALTHY else "because of"
            line += f" since {at(since)}, {verb}: {health['why']}; its state changed {health['changes']} times"
        yield line + (f"; shows {', '.join(signs)}" if signs else "")


def transition_lines(said: Mapping[str, Any]) -> Iterator[str]:
    """How often what happened to the node since the daemon began, and the last of it with its time."""
    transitions = said.get("transitions") or {}
    if not transitions.get("total"):
        return
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(transitions["counts"].items()))
    last = transitions["last"][-SHOWN:]
    rest = ", the last:" if len(last) < transitions["total"] else ":"
    yield f"{transitions['total']} changes since {at(transitions['since_s'])} ({counts}){rest}"
    yield from (f"  {at(each['at_s'])}  {each['what']}" for each in last)


def at(seconds: float) -> str:
    """A moment for people. seconds: since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
