"""Which GPUs a claim gets: pure and deterministic. Topology comes later; here order is NVML's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import eq, ge, gt, le, lt
from typing import Any, Final, assert_never

from nri_gpu.allocation.ledger import UNUSED, Ledger, Usage
from nri_gpu.domain.claim import (
    ArchSelector,
    Claim,
    Count,
    Devices,
    Everything,
    MemorySelector,
    Mode,
    ModelSelector,
    Nothing,
    Operator,
    Selector,
)
from nri_gpu.domain.container import PodUid
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.gpu import Gpu, GpuUuid, Inventory

COMPARE: Final[Mapping[Operator, Callable[[Any, Any], bool]]] = {
    Operator.AT_LEAST: ge,
    Operator.AT_MOST: le,
    Operator.ABOVE: gt,
    Operator.BELOW: lt,
    Operator.EQUAL: eq,
}
# A refusal holds 700 characters, and its end says what to do: names and reasons from elsewhere are clipped.
NAME_SHOWN_MAX: Final = 80  # characters; a pod's `namespace/name` can have 317
WHY_SHOWN_MAX: Final = 200  # characters
HOLDERS_SHOWN: Final = 3
HIDDEN_SHOWN: Final = 3
INDICES_SHOWN: Final = 16


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and in which mode."""

    pod_uid: PodUid
    mode: Mode


def place(claim: Claim, asker: Asker, inventory: Inventory, ledger: Ledger) -> tuple[Gpu, ...] | Reason:
    """The GPUs a claim gets, in NVML order, or why it gets none."""
    usage = ledger.usage()
    match claim.wanted:
        case Nothing():
            return ()
        case Everything():
            return _all(claim, asker, inventory, usage)
        case Devices(ids):
            return _named(ids, claim, asker, inventory, usage)
        case Count(gpus):
            return _count(gpus, claim, asker, inventory, usage)
        case never:
            assert_never(never)


def matches(gpu: Gpu, selectors: Iterable[Selector]) -> bool:
    """Whether a GPU fits every selector."""
    return all(_fits(gpu, selector) for selector in selectors)


def why_not(gpu: Gpu) -> str:
    """Why a GPU can be granted to nobody; empty when it can."""
    return gpu.unavailable or ("it is in MIG mode" if gpu.mig_enabled else "")


def _fits(gpu: Gpu, selector: Selector) -> bool:
    match selector:
        case ModelSelector(glob):
            return fnmatchcase(gpu.model.lower(), glob.lower())
        case MemorySelector(operator, memory_bytes):
            return COMPARE[operator](gpu.memory_bytes, memory_bytes)
        case ArchSelector(operator, arch):
            return COMPARE[operator](gpu.arch, arch)
        case never:
            assert_never(never)


def _all(claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]) -> tuple[Gpu, ...] | Reason:
    chosen = tuple(gpu for gpu in inventory.gpus if not why_not(gpu) and matches(gpu, claim.selectors))
    if not chosen:
        return _none_fit(claim, inventory)
    for gpu in chosen:
        if usage.get(gpu.uuid, UNUSED).blocks(asker.mode, asker.pod_uid):
            return _busy(gpu, asker, usage[gpu.uuid])
    return chosen


def _count(
    gpus: int, claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[Gpu, ...] | Reason:
    fitting = [gpu for gpu in inventory.gpus if not why_not(gpu) and matches(gpu, claim.selectors)]
    if len(fitting) < gpus:
        return _none_fit(claim, inventory) if not fitting else _too_few(gpus, claim, fitting, inventory)
    open_ones = [g for g in fitting if not usage.get(g.uuid, UNUSED).blocks(asker.mode, asker.pod_uid)]
    if len(open_ones) < gpus:
        return _all_busy(gpus, asker, fitting, open_ones, usage)
    # The least loaded first, then the lowest index. In exclusive mode the only load is the pod's own containers,
    # so they get GPUs of their own while there are any and share when there are none.
    ranked = sorted(open_ones, key=lambda gpu: (usage.get(gpu.uuid, UNUSED).load, gpu.index))
    return tuple(sorted(ranked[:gpus], key=lambda gpu: gpu.index))


def _named(
    ids: tuple[str, ...], claim: Claim, asker: Asker, inventory: Inventory, usage: Mapping[GpuUuid, Usage]
) -> tuple[Gpu, ...] | Reason:
    chosen: dict[GpuUuid, Gpu] = {}
    for wanted in ids:
        gpu = _find(wanted, inventory)
        if isinstance(gpu, Reason):
            return gpu
        if why := why_not(gpu):
            return _cannot(_label(gpu), why)
        if not matches(gpu, claim.selectors):
            return Reason(
                Code.NO_SUCH_GPU,
                f"GPU {_label(gpu)}, {gpu.model}, does not fit the selectors beside it: drop them, or name another.",
            )
        if usage.get(gpu.uuid, UNUSED).blocks(asker.mode, asker.pod_uid):
            return _busy(gpu, asker, usage[gpu.uuid])
        chosen[gpu.uuid] = gpu
    return tuple(sorted(chosen.values(), key=lambda gpu: gpu.index))


def _find(wanted: str, inventory: Inventory) -> Gpu | Reason:
    """By NVML index, PCI bus id, UUID or its unambiguous beginning."""
    if wanted.isdecimal():
        found = [gpu for gpu in inventory.gpus if gpu.index == int(wanted)]
        lost = [fault.reason for fault in inventory.faults if fault.index == int(wanted)]
        if lost and not found:
            return _cannot(wanted, lost[0])
    else:
        asked = wanted.lower()
        found = [gpu for gpu in inventory.gpus if gpu.pci_bus_id == asked or gpu.uuid.lower().startswith(asked)]
    if len(found) > 1:
        return Reason(Code.BAD_REQUEST, f"{wanted!r} is the beginning of {len(found)} UUIDs here: write more of it.")
    if not found:
        return Reason(Code.NO_SUCH_GPU, f"this node has no GPU {wanted!r}; it has {_listing(inventory.gpus)}.")
    return found[0]


def _label(gpu: Gpu) -> str:
    return f"{gpu.index} ({gpu.uuid})"


def _listing(gpus: Sequence[Gpu]) -> str:
    return "no GPUs" if not gpus else "GPUs " + _named_few([str(gpu.index) for gpu in gpus], INDICES_SHOWN)


def _named_few(names: Iterable[str], few: int) -> str:
    """`a, b and 3 more`: names are other people's, and a sentence must keep room for what to do."""
    distinct = [_clip(name, NAME_SHOWN_MAX) for name in dict.fromkeys(names)]
    more = f" and {len(distinct) - few} more" if len(distinct) > few else ""
    return ", ".join(distinct[:few]) + more


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _cannot(which: str, why: str) -> Reason:
    return Reason(
        Code.GPU_UNAVAILABLE,
        f"GPU {which} cannot be granted: {_clip(why, WHY_SHOWN_MAX)}; ask for another, or mend it on the node "
        "(`nvidia-smi` and `dmesg | grep NVRM` there say more).",
    )


def _busy(gpu: Gpu, asker: Asker, usage: Usage) -> Reason:
    others = [name for uid, name in usage.pods.items() if uid != asker.pod_uid] or list(usage.pods.values())
    holders = _named_few([*others, *(f"{pod} (not through nri-gpu)" for pod in usage.foreign)], HOLDERS_SHOWN)
    how = "by" if usage.mode is None else "exclusively by" if usage.mode is Mode.EXCLUSIVE else "in shared mode by"
    return Reason(
        Code.GPU_BUSY,
        f"GPU {_label(gpu)} is held {how} {holders}, and asked for here in {asker.mode} mode: wait until it is free, "
        f"ask for other GPUs, or set {_cure(asker.mode, {usage.mode})}.",
    )


def _cure(asked: Mode, held: Set[Mode | None]) -> str:
    """Where `mode=shared` would let both have it."""
    if asked is Mode.SHARED:
        return "mode=shared on the holder"
    return "mode=shared on both" if Mode.EXCLUSIVE in held else "mode=shared here"


def _all_busy(
    gpus: int, asker: Asker, fitting: Sequence[Gpu], open_ones: Sequence[Gpu], usage: Mapping[GpuUuid, Usage]
) -> Reason:
    taken = [usage[gpu.uuid] for gpu in fitting if gpu not in open_ones]
    names = [name for each in taken for name in each.pods.values()]
    names += [f"{pod} (not through nri-gpu)" for each in taken for pod in each.foreign]
    holders = _named_few(sorted(names), HOLDERS_SHOWN)
    cure = _cure(asker.mode, {each.mode for each in taken})
    return Reason(
        Code.GPU_BUSY,
        f"asked for {gpus} GPU{'s' * (gpus > 1)} in {asker.mode} mode, but of the {len(fitting)} that fit "
        f"{len(open_ones) or 'none'} can be had now, the rest being held by {holders}: wait until one is free, "
        f"{'ask for fewer, ' if open_ones else ''}or set {cure}.",
    )


def _too_few(gpus: int, claim: Claim, fitting: Sequence[Gpu], inventory: Inventory) -> Reason:
    which = " that fit the selectors" if claim.selectors else " that can be granted"
    return Reason(
        Code.NO_SUCH_GPU,
        f"asked for {gpus} GPUs, but this node has {len(fitting)}{which}{_hidden(inventory)}: ask for fewer, or run "
        "the pod on another node.",
    )


def _none_fit(claim: Claim, inventory: Inventory) -> Reason:
    if claim.selectors and any(not why_not(gpu) for gpu in inventory.gpus):
        models = _named_few(sorted({gpu.model for gpu in inventory.gpus}), HOLDERS_SHOWN)
        return Reason(
            Code.NO_SUCH_GPU,
            f"no GPU of this node fits {_clip(claim.text, NAME_SHOWN_MAX)!r}; it has {models}{_hidden(inventory)}: "
            "loosen the selectors, or run the pod on another node.",
        )
    return Reason(
        Code.NO_SUCH_GPU,
        f"this node has no GPU that can be granted{_hidden(inventory)}: run the pod on another node, or see "
        "`nri-gpu gpus` and `nvidia-smi` on this one.",
    )


def _hidden(inventory: Inventory) -> str:
    """GPUs that are there but cannot be granted, said in passing."""
    bad = [(gpu.index, why_not(gpu)) for gpu in inventory.gpus if why_not(gpu)]
    bad += [(fault.index, fault.reason) for fault in inventory.faults]
    said = "; ".join(f"GPU {index}: {_clip(why, NAME_SHOWN_MAX)}" for index, why in bad[:HIDDEN_SHOWN])
    return f" ({said})" if bad else ""
