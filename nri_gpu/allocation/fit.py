"""Whether a GPU or MIG device can be granted at all, and whether it is of the kind that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import eq, ge, gt, le, lt
from typing import Any, Final, assert_never

from nri_gpu.domain.claim import ArchSelector, MemorySelector, ModelSelector, Operator, Selector
from nri_gpu.domain.gpu import Gpu, Inventory, MigPart, Unit

COMPARE: Final[Mapping[Operator, Callable[[Any, Any], bool]]] = {
    Operator.AT_LEAST: ge,
    Operator.AT_MOST: le,
    Operator.ABOVE: gt,
    Operator.BELOW: lt,
    Operator.EQUAL: eq,
}


@lru_cache(maxsize=64)  # 8 GPUs looked at are a fifth of a decision, and always come to the same
def fitting_gpus(inventory: Inventory, selectors: tuple[Selector, ...]) -> tuple[Gpu, ...]:
    """The GPUs that can be granted and fit every selector, in NVML order, whoever holds them."""
    return tuple(gpu for gpu in inventory.gpus if not why_not(gpu) and matches(gpu, selectors))


def matches(unit: Unit, selectors: Iterable[Selector]) -> bool:
    """Whether a GPU fits every selector. Of a MIG device: its own memory, its GPU's model and architecture."""
    return all(_fits(unit, selector) for selector in selectors)


def why_not(unit: Unit) -> str:
    """Why a GPU or a MIG device can be granted to nobody; empty when it can."""
    if isinstance(unit, MigPart):
        return _why_not_part(unit)
    return unit.unavailable or ("it is in MIG mode" if unit.mig_enabled else "")


def _why_not_part(part: MigPart) -> str:
    if why := part.gpu.unavailable or part.device.unavailable:
        return why
    if not part.gpu.mig_enabled:
        return "its GPU is not in MIG mode"
    # Without its two capability nodes it opens, and then fails in the program.
    minors = (part.device.gpu_instance_minor, part.device.compute_instance_minor)
    return "the minors of its capability nodes are not known" if None in minors else ""


def _fits(unit: Unit, selector: Selector) -> bool:
    match selector:
        case ModelSelector(glob):
            return fnmatchcase(unit.model.lower(), glob.lower())
        case MemorySelector(operator, memory_bytes):
            return COMPARE[operator](unit.memory_bytes, memory_bytes)
        case ArchSelector(operator, arch):
            return COMPARE[operator](unit.arch, arch)
        case never:
            assert_never(never)
