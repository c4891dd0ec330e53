"""What became of a node between two inventories, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from nri_gpu.domain.gpu import Gpu, Inventory, Unit, whole


def changes(before: Inventory, after: Inventory) -> tuple[str, ...]:
    """One sentence for each thing that changed; none where nothing did but the time."""
    return (*_node(before, after), *_units(before, after))


def _node(before: Inventory, after: Inventory) -> Iterator[str]:
    if before.fault != after.fault:
        yield after.fault or "the driver answers again"
    for name, old, new in (
        ("driver", before.driver_version, after.driver_version),
        ("CUDA", before.cuda_version, after.cuda_version),
    ):
        if old != new:
            yield f"{name} {old or '?'} -> {new or '?'}"
    for field in ("majors", "links", "numa", "extras"):
        if getattr(before, field) != getattr(after, field):
            yield f"{field} changed"
    for fault in after.faults:
        if fault not in before.faults:
            yield f"GPU {fault.index} cannot be described: {fault.reason}"


def _units(before: Inventory, after: Inventory) -> Iterator[str]:
    old, new = ({unit.uuid: unit for unit in each.units} for each in (before, after))
    for uuid, unit in old.items():
        if uuid not in new:
            yield f"{_name(unit)} is gone"
    for uuid, unit in new.items():
        if uuid not in old:
            yield f"{_name(unit)} is new{_why(unit)}"
        else:
            yield from _unit(old[uuid], unit)


def _unit(old: Unit, new: Unit) -> Iterator[str]:
    was, now = _unavailable(old), _unavailable(new)
    if was != now:
        yield f"{_name(new)} is unavailable: {now}" if now else f"{_name(new)} is available again"
    if isinstance(old, Gpu) and isinstance(new, Gpu):
        if old.mig_enabled != new.mig_enabled:
            yield f"{_name(new)} is {'in' if new.mig_enabled else 'no longer in'} MIG mode"
        if old.index != new.index:
            yield f"{_name(new)} had index {old.index}"
        if old.minor_number != new.minor_number:
            yield f"{_name(new)} had minor {old.minor_number}, and has {new.minor_number}"


def _name(unit: Unit) -> str:
    if isinstance(unit, Gpu):
        return f"GPU {unit.index} ({unit.uuid})"
    return f"MIG device {unit.place} {unit.device.profile} ({unit.uuid}) of GPU {whole(unit).index}"


def _unavailable(unit: Unit) -> str:
    return unit.unavailable if isinstance(unit, Gpu) else unit.device.unavailable


def _why(unit: Unit) -> str:
    return f", and unavailable: {why}" if (why := _unavailable(unit)) else ""
