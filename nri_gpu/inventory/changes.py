"""The differences between two inventories of a node, each with a sentence. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Final

from nri_gpu.domain.gpu import Gpu, MigDevice, MigPart, Unit, whole
from nri_gpu.domain.health import HealthState, Transition, TransitionKind
from nri_gpu.domain.node import Inventory

_OF_NODE: Final[Mapping[str, TransitionKind]] = {
    **dict.fromkeys(("driver_version", "cuda_version"), TransitionKind.DRIVER),
    **dict.fromkeys(
        ("majors.nvidia", "majors.nvidia_uvm", "majors.nvidia_caps", "majors.modeset"), TransitionKind.MODULE
    ),
    **dict.fromkeys(("links", "numa", "extras", "modules"), TransitionKind.FACTS),
}
# Of a GPU or a MIG device; all others are facts.
_KINDS: Final = {
    "index": TransitionKind.NUMBER,
    "minor_number": TransitionKind.NUMBER,
    "mig_enabled": TransitionKind.MIG,
}
# Fields with sentences of their own.
_OWN: Final = frozenset({"uuid", "mig", "unavailable", "signs", "remap_pending", "health", "cordon"})
_HOW: Final = {HealthState.HEALTHY: "is healthy, recovered from", HealthState.RECOVERING: "is recovering from"}
_SHORT: Final = 60  # characters of a fact that a sentence can hold


def changes(before: Inventory, after: Inventory) -> tuple[Transition, ...]:
    """Return one transition for each thing that changed, or none if only the time of the inventory did."""
    return (*_node(before, after), *_faults(before, after), *_unlisted(before, after), *_units(before, after))


def _node(before: Inventory, after: Inventory) -> Iterator[Transition]:
    if before.fault != after.fault:
        what = after.fault or "the driver answers again"
        yield Transition(kind=TransitionKind.ANSWER, what=what, worse=bool(after.fault))
    for name, kind in _OF_NODE.items():
        was, now = map(attrgetter(name), (before, after))
        if was != now:
            yield Transition(kind=kind, what=_fact(name, was, now), worse=now is None)


def _faults(before: Inventory, after: Inventory) -> Iterator[Transition]:
    old, new = ({fault.index: fault for fault in each.faults} for each in (before, after))
    for index, fault in new.items():
        if old.get(index) != fault:
            what = f"GPU {index} cannot be described: {fault.reason}"
            yield Transition(kind=TransitionKind.DESCRIPTION, what=what, index=index, worse=True)
    for index in old.keys() - new.keys():
        what = f"GPU {index} can be described again, or is gone"
        yield Transition(kind=TransitionKind.DESCRIPTION, what=what, index=index)


def _unlisted(before: Inventory, after: Inventory) -> Iterator[Transition]:
    old, new = ({gpu.pci_bus_id: gpu for gpu in each.unlisted} for each in (before, after))
    for bus_id, gpu in new.items():
        if old.get(bus_id) != gpu:
            what = f"GPU {bus_id} is not listed by NVML: {gpu.reason}"
            yield Transition(kind=TransitionKind.DESCRIPTION, what=what, uuid=gpu.uuid, worse=gpu.missing)
    for bus_id in old.keys() - new.keys():
        what = f"GPU {bus_id} is listed by NVML now, or no longer on the bus"
        yield Transition(kind=TransitionKind.DESCRIPTION, what=what, uuid=old[bus_id].uuid)


def _units(before: Inventory, after: Inventory) -> Iterator[Transition]:
    old, new = ({unit.uuid: unit for unit in each.units} for each in (before, after))
    for uuid, unit in old.items():
        if uuid not in new:
            yield _of(unit, _kind(unit), "is gone", worse=isinstance(unit, Gpu))
    for uuid, unit in new.items():
        if uuid not in old:
            yield _of(unit, _kind(unit), f"is new{_why(unit)}", worse=bool(_unavailable(unit)))
        else:
            yield from _unit(old[uuid], unit)


def _unit(old: Unit, new: Unit) -> Iterator[Transition]:
    if isinstance(old, Gpu) and isinstance(new, Gpu):
        yield from _signs(old, new)
        yield from _health(old, new)
    yield from _available(old, new)
    was, now = _described(old), _described(new)
    for name in now.__struct_fields__:
        if name not in _OWN and name not in now.aside and getattr(was, name) != getattr(now, name):
            fact = _fact(name, getattr(was, name), getattr(now, name))
            yield _of(new, _KINDS.get(name, TransitionKind.FACTS), fact)


def _described(unit: Unit) -> Gpu | MigDevice:
    return unit.device if isinstance(unit, MigPart) else unit


def _fact(name: str, was: object, now: object) -> str:
    sentence = f"{name} {was} -> {now}"
    return sentence if len(sentence) <= _SHORT and "(" not in sentence else f"{name} changed"


def _health(old: Gpu, new: Gpu) -> Iterator[Transition]:
    health = new.health
    if old.health.state is not health.state:
        how = _HOW.get(health.state, f"is {health.state}, because of")
        worse = health.state in (HealthState.BAD, HealthState.SUSPECT)
        yield _of(new, TransitionKind.HEALTH, f"{how}: {health.why}", worse=worse)


def _signs(old: Gpu, new: Gpu) -> Iterator[Transition]:
    for sign in new.signs:
        if sign not in old.signs:
            yield _of(new, TransitionKind.SIGN, f"shows {sign}", worse=True)
    for sign in old.signs:
        if sign not in new.signs:
            yield _of(new, TransitionKind.SIGN, f"no longer shows {sign}")


def _available(old: Unit, new: Unit) -> Iterator[Transition]:
    """Yield a change of availability that health did not cause; health has its own transition."""
    was, now = _unavailable(old), _unavailable(new)
    if was == now or _by_health(new, now) or (not now and _by_health(old, was)):
        return
    what = f"is unavailable: {now}" if now else "is available again"
    yield _of(new, TransitionKind.AVAILABLE, what, worse=bool(now))


def _by_health(unit: Unit, why: str) -> bool:
    return bool(why) and isinstance(unit, Gpu) and not unit.health.grantable


def _of(unit: Unit, kind: TransitionKind, what: str, *, worse: bool = False) -> Transition:
    return Transition(kind=kind, what=f"{_name(unit)} {what}", uuid=unit.uuid, index=whole(unit).index, worse=worse)


def _kind(unit: Unit) -> TransitionKind:
    return TransitionKind.GPU if isinstance(unit, Gpu) else TransitionKind.MIG


def _name(unit: Unit) -> str:
    if isinstance(unit, Gpu):
        return f"GPU {unit.index} ({unit.uuid})"
    return f"MIG device {unit.place} {unit.device.profile} ({unit.uuid}) of GPU {whole(unit).index}"


def _unavailable(unit: Unit) -> str:
    return _described(unit).unavailable


def _why(unit: Unit) -> str:
    return f", and unavailable: {why}" if (why := _unavailable(unit)) else ""
