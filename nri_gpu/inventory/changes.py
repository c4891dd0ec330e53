"""The differences between two inventories of a node, each with a sentence. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nri_gpu.domain.gpu import Gpu, MigPart, Unit, whole
from nri_gpu.domain.health import HealthState, Transition, TransitionKind
from nri_gpu.domain.node import GpuFault, Inventory

_MODULES: Final = (("nvidia", "nvidia"), ("nvidia_uvm", "nvidia-uvm"), ("nvidia_caps", "nvidia-caps"))
# Fields with a sentence of their own; all others share one.
_OWN: Final = frozenset(
    {"index", "minor_number", "uuid", "mig_enabled", "mig", "unavailable", "signs", "remap_pending", "health"}
)
_HOW: Final = {HealthState.HEALTHY: "is healthy, recovered from", HealthState.RECOVERING: "is recovering from"}
_SHORT: Final = 60  # characters of a fact that a sentence can hold


def changes(before: Inventory, after: Inventory) -> tuple[Transition, ...]:
    """Return one transition for each thing that changed, or none if only the time of the inventory did."""
    return (*_node(before, after), *_faults(before, after), *_unlisted(before, after), *_units(before, after))


def _node(before: Inventory, after: Inventory) -> Iterator[Transition]:
    if before.fault != after.fault:
        what = after.fault or "the driver answers again"
        yield Transition(kind=TransitionKind.ANSWER, what=what, worse=bool(after.fault))
    for name, old, new in (
        ("driver", before.driver_version, after.driver_version),
        ("CUDA", before.cuda_version, after.cuda_version),
    ):
        if old != new:
            yield Transition(kind=TransitionKind.DRIVER, what=f"{name} {old or '?'} -> {new or '?'}")
    for field, module in _MODULES:
        if (was := getattr(before.majors, field)) != (now := getattr(after.majors, field)):
            yield Transition(kind=TransitionKind.MODULE, what=_major(module, was, now), worse=now is None)
    if before.majors.modeset != after.majors.modeset:
        loaded = "is loaded" if after.majors.modeset else "is not loaded, or the driver does not tell"
        yield Transition(kind=TransitionKind.MODULE, what=f"kernel module nvidia-modeset {loaded}")
    for field in ("links", "numa", "extras", "modules"):
        if getattr(before, field) != getattr(after, field):
            yield Transition(kind=TransitionKind.FACTS, what=f"{field} changed")


def _major(module: str, was: int | None, now: int | None) -> str:
    if now is None:
        return f"kernel module {module} is no longer loaded"
    return f"kernel module {module} has major {now}" + ("" if was is None else f", and had {was}")


def _faults(before: Inventory, after: Inventory) -> Iterator[Transition]:
    old, new = ({fault.index: fault for fault in each.faults} for each in (before, after))
    for index, fault in new.items():
        if old.get(index) != fault:
            what = f"GPU {index} cannot be described: {fault.reason}"
            yield Transition(kind=TransitionKind.DESCRIPTION, what=what, index=index, worse=True)
    yield from (_fault_gone(fault, after) for index, fault in old.items() if index not in new)


def _fault_gone(fault: GpuFault, after: Inventory) -> Transition:
    there = any(gpu.index == fault.index for gpu in after.gpus)
    what = "can be described again" if there else "is gone, and could not be described"
    return Transition(kind=TransitionKind.DESCRIPTION, what=f"GPU {fault.index} {what}", index=fault.index)


def _unlisted(before: Inventory, after: Inventory) -> Iterator[Transition]:
    old, new = ({gpu.pci_bus_id: gpu for gpu in each.unlisted} for each in (before, after))
    for bus_id, gpu in new.items():
        if old.get(bus_id) != gpu:
            what = f"GPU {bus_id} is not listed by NVML: {gpu.reason}"
            yield Transition(kind=TransitionKind.DESCRIPTION, what=what, uuid=gpu.uuid, worse=gpu.given)
    listed = {gpu.pci_bus_id for gpu in after.gpus}
    for bus_id in old.keys() - new.keys():
        what = "is listed by NVML now" if bus_id in listed else "is no longer on the bus"
        yield Transition(kind=TransitionKind.DESCRIPTION, what=f"GPU {bus_id} {what}", uuid=old[bus_id].uuid)


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
        yield from _gpu(old, new)
    elif isinstance(old, MigPart) and isinstance(new, MigPart):
        yield from _available(old, new)
        if old.device.index != new.device.index:
            yield _of(new, TransitionKind.NUMBER, f"had index {old.device.index}")


def _health(old: Gpu, new: Gpu) -> Iterator[Transition]:
    health = new.health
    if old.health.state is not health.state:
        how = _HOW.get(health.state, f"is {health.state}, because of")
        yield _of(
            new,
            TransitionKind.HEALTH,
            f"{how}: {health.why}",
            worse=health.state in (HealthState.BAD, HealthState.SUSPECT),
        )


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


def _gpu(old: Gpu, new: Gpu) -> Iterator[Transition]:
    if old.mig_enabled != new.mig_enabled:
        yield _of(new, TransitionKind.MIG, f"is {'in' if new.mig_enabled else 'no longer in'} MIG mode")
    if old.index != new.index:
        yield _of(new, TransitionKind.NUMBER, f"had index {old.index}")
    if old.minor_number != new.minor_number:
        yield _of(new, TransitionKind.NUMBER, f"had minor {old.minor_number}, and has {new.minor_number}")
    for name in Gpu.__struct_fields__:
        if name not in _OWN and name not in Gpu.aside and getattr(old, name) != getattr(new, name):
            yield _of(new, TransitionKind.FACTS, _fact(name, getattr(old, name), getattr(new, name)))


def _fact(name: str, was: object, now: object) -> str:
    sentence = f"has {name} {now}, and had {was}"
    return sentence if len(sentence) <= _SHORT and "(" not in sentence else f"has another {name}"


def _of(unit: Unit, kind: TransitionKind, what: str, *, worse: bool = False) -> Transition:
    return Transition(kind=kind, what=f"{_name(unit)} {what}", uuid=unit.uuid, index=whole(unit).index, worse=worse)


def _kind(unit: Unit) -> TransitionKind:
    return TransitionKind.GPU if isinstance(unit, Gpu) else TransitionKind.MIG


def _name(unit: Unit) -> str:
    if isinstance(unit, Gpu):
        return f"GPU {unit.index} ({unit.uuid})"
    return f"MIG device {unit.place} {unit.device.profile} ({unit.uuid}) of GPU {whole(unit).index}"


def _unavailable(unit: Unit) -> str:
    return unit.unavailable if isinstance(unit, Gpu) else unit.device.unavailable


def _why(unit: Unit) -> str:
    return f", and unavailable: {why}" if (why := _unavailable(unit)) else ""
