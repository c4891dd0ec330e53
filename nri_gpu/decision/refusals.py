"""The test whether a GPU or MIG device can be granted and fits a request, and the refusals where none does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from itertools import chain
from operator import eq, ge, gt, le, lt
from typing import Final, assert_never

from msgspec.structs import replace

from nri_gpu.domain.allocation import NVIDIA_DRIVER, ClaimUid
from nri_gpu.domain.container import Pod, PodUid
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.gpu import Gpu, GpuUuid, MigPart, Unit, described, health_of
from nri_gpu.domain.gpu_request import (
    ArchSelector,
    Claim,
    MemorySelector,
    MigProfile,
    Mode,
    ModelSelector,
    Operator,
    Selector,
)
from nri_gpu.domain.node import Inventory
from nri_gpu.domain.text import clipped, counted, listed, quoted
from nri_gpu.ledger.holders import ExternalAllocation, Releasing, Usage

CORDONED: Final = "taken out of use by the node's administrator"
CORDONS_UNKNOWN: Final = "whether it is taken out of use is not known: see `nri-gpu status` there"
IN_MIG_MODE: Final = "it is in MIG mode"  # so only its MIG devices can be
MEMORY_UNKNOWN: Final = "its memory is unknown"  # NVML tells no memory of a GPU that shares the host's
COMPARE: Final[Mapping[Operator, Callable[..., bool]]] = {
    Operator.AT_LEAST: ge,
    Operator.AT_MOST: le,
    Operator.ABOVE: gt,
    Operator.BELOW: lt,
    Operator.EQUAL: eq,
}


def fitting_gpus(inventory: Inventory, selectors: tuple[Selector, ...]) -> tuple[Gpu, ...]:
    """Return the GPUs that can be granted and fit every selector, in NVML order, held or not."""
    return tuple(gpu for gpu in inventory.gpus if not why_not(gpu) and matches(gpu, selectors))


def matches(unit: Unit, selectors: Iterable[Selector]) -> bool:
    """Return whether a unit fits every selector. Of a MIG device, the memory is its own, the rest its GPU's."""
    return all(_fits(unit, selector) for selector in selectors)


def why_not(unit: Unit, *, admin: bool = False, given: bool = False) -> str:
    """Return why a GPU or a MIG device cannot be granted to any container, or empty.

    admin: the container monitors; it may have GPUs that are ill above all, or out of use. given: to what has it from
    before it was taken out of use.
    """
    ill, cordon = admin and not health_of(unit).grantable, described(unit).cordon
    out_of_use = "" if cordon is None or admin or given else CORDONS_UNKNOWN if cordon.unknown else CORDONED
    if isinstance(unit, MigPart):
        return _why_not_part(unit, out_of_use, ill=ill)
    return ("" if ill else unit.unavailable) or out_of_use or (IN_MIG_MODE if unit.mig_enabled else "")


def _why_not_part(part: MigPart, out_of_use: str, *, ill: bool) -> str:
    if why := ("" if ill else part.gpu.unavailable or part.device.unavailable) or out_of_use:
        return why
    if not part.gpu.mig_enabled:
        return "its GPU is not in MIG mode"
    # Without its two capability nodes a MIG device opens, and then fails in the program.
    minors = (part.device.gpu_instance_minor, part.device.compute_instance_minor)
    return "the minors of its capability nodes are not known" if None in minors else ""


def _fits(unit: Unit, selector: Selector) -> bool:
    match selector:
        case ModelSelector(glob):
            return fnmatchcase(unit.model.lower(), glob.lower())
        case MemorySelector(operator, memory_bytes):
            return unit.memory_bytes is not None and COMPARE[operator](unit.memory_bytes, memory_bytes)
        case ArchSelector(operator, arch):
            return unit.arch is not None and COMPARE[operator](unit.arch, arch)
        case never:
            assert_never(never)


def _why_unknown(unit: Unit, selectors: Iterable[Selector]) -> str:
    """Return that a number which the selectors compare is unknown of this unit, as a clause, or empty."""
    for selector in selectors:
        if isinstance(selector, MemorySelector) and unit.memory_bytes is None:
            return MEMORY_UNKNOWN
        if isinstance(selector, ArchSelector) and unit.arch is None:
            return "its compute capability is unknown"
    return ""


# A refusal holds 700 characters, and its end says what to do: names and reasons from elsewhere are clipped.
NAME_SHOWN_MAX: Final = 80  # characters; a pod's `namespace/name` can have 317
HOLDER_SHOWN_MAX: Final = 120  # characters
OPENING_POD_SHOWN_MAX, OPENING_CONTAINER_SHOWN_MAX = 42, 34  # characters: the words between them end what is shown
EXTERNAL_CONTAINER_SHOWN_MAX: Final = 22  # characters
PREPARED_SHOWN_MAX: Final = 42  # characters of a device's name
WHY_SHOWN_MAX: Final = 200  # characters
HOLDERS_SHOWN: Final = 3
HIDDEN_SHOWN: Final = 3
INDICES_SHOWN: Final = 16
TEMPLATE_HASH: Final = "pod-template-hash"  # label of a Deployment's pods (kubernetes: apps/v1/types.go)
RANDOM_LENGTH: Final = 5  # characters at the end of a pod's name (kubernetes: apiserver/pkg/storage/names/generate.go)
# The kubelet gives a container the same devices at each start.
_ANOTHER_GPU: Final = "delete the pod, or all pods that use its ResourceClaim, so that its replacement gets another GPU"
_NEW_POD: Final = f"the kubelet allocated it to this pod permanently: {_ANOTHER_GPU}"


def called(unit: Unit) -> str:
    """Return `GPU 0 (GPU-...)` or `MIG device 0:1 (MIG-...)`."""
    name = f"MIG device {unit.place}" if isinstance(unit, MigPart) else f"GPU {unit.index}"
    return f"{name} ({unit.uuid})"


def unknown(wanted: str, inventory: Inventory, *, kubelet: bool = False) -> Reason:
    """Refuse: no GPU here has this name. kubelet: the kubelet chose it."""
    cure = f"; {_NEW_POD}" if kubelet else ""
    if wanted.startswith("MIG-") or wanted.count(":") == 1:
        has = named_few([part.place for part in inventory.parts], INDICES_SHOWN) or "none"
        return Reason(Code.NO_SUCH_GPU, f"this node has no MIG device {wanted!r}; it has {has}{cure}")
    grantable = f" that can be granted{_hidden(inventory)}" if inventory.unlisted and not inventory.gpus else ""
    indices = named_few([str(gpu.index) for gpu in inventory.gpus], INDICES_SHOWN)
    has = f"GPUs {indices}" if indices else "no GPUs"
    return Reason(Code.NO_SUCH_GPU, f"this node has no GPU {wanted!r}; it has {has}{grantable}{cure}")


def in_pool(unit: Unit, pool: str, resource: str) -> Reason:
    """Refuse: the unit is named, and the container is not offered it.

    pool: the unit's; empty: it is in none. resource: by which the kubelet allocates it, or empty.
    """
    where = (
        f"in pool {quoted(pool)}, which is kept for others" if pool else "in no pool, and the policy's rule names one"
    )
    instead = (
        f"write {resource} into the container's resources.limits and name no GPU"
        if resource
        else "have the policy open it to this pod's namespace"
    )
    return Reason(Code.NOT_ALLOWED, f"{called(unit)} is {where}", cure=f"name another GPU, or {instead}")


def ambiguous(wanted: str, found: int) -> Reason:
    """Refuse: several UUIDs begin like this."""
    return Reason(Code.BAD_REQUEST, f"{wanted!r} is the beginning of {found} UUIDs here", cure="write more of it")


def misfit(unit: Unit, claim: Claim) -> Reason:
    """Refuse: the unit is named, and does not fit the selectors of the same request."""
    because = f", since {why}" if (why := _why_unknown(unit, claim.selectors)) else ""
    return Reason(
        Code.NO_SUCH_GPU,
        f"{called(unit)}, {unit.model}, does not fit the selectors of the same request{because}",
        cure=f"drop the selectors, or {_ANOTHER_GPU if claim.kubelet else 'name another GPU'}",
    )


def named_few(names: Iterable[str], few: int, shown: int = NAME_SHOWN_MAX) -> str:
    """Return `a, b and 3 more`: a sentence must keep room for what to do."""
    return listed((clipped(name, shown) for name in dict.fromkeys(names)), few)


def by_the_kernel(inventory: Inventory) -> str:
    """List the GPUs that the kernel shows if NVML does not answer, in brackets, without a reason that all share."""
    named = [
        " ".join(filter(None, (gpu.pci_bus_id, gpu.model)))
        + (f", {clipped(gpu.reason, NAME_SHOWN_MAX)}" if gpu.reason != inventory.fault else "")
        for gpu in inventory.unlisted
    ]
    more = f"; and {len(named) - HIDDEN_SHOWN} more" if len(named) > HIDDEN_SHOWN else ""
    return f" (the kernel shows GPU {'; '.join(named[:HIDDEN_SHOWN])}{more})" if named else ""


def cannot(which: str, why: str, *, kubelet: bool = False) -> Reason:
    """Refuse: the unit is named, and lost or otherwise unavailable. kubelet: the kubelet chose it."""
    repair = ", or repair it on the node (see `nvidia-smi` and `dmesg | grep NVRM` there)"
    cure = f"{_NEW_POD if kubelet else 'ask for another'}{'' if why in (CORDONED, CORDONS_UNKNOWN) else repair}"
    return Reason(Code.GPU_UNAVAILABLE, f"{which} cannot be granted", clipped(why, WHY_SHOWN_MAX), cure)


def busy(
    unit: Unit,
    pod_uid: PodUid,
    asked: Mode,
    usage: Usage,
    claims: Set[ClaimUid] = frozenset(),
    *,
    kubelet: bool = False,
) -> Reason:
    """Refuse: the unit is held in a way that excludes this request, or just released and perhaps still in use.

    kubelet: the kubelet chose it.
    """
    if usage.releasing is not None and not usage.held_from(asked, pod_uid, claims):
        return Reason(
            Code.GPU_BUSY,
            f"{called(unit)} was just released by {_shown(usage.releasing)}; other pods can have it once no process "
            f"uses it, or {usage.releasing.grace_s:g} s after its release",
            cure=f"wait until then, or {_ANOTHER_GPU if kubelet else 'ask for other GPUs'}",
        )
    holders = _holders(usage, pod_uid)
    how = "exclusively by" if usage.mode is Mode.EXCLUSIVE else f"in {usage.mode} mode by" if usage.mode else "by"
    held = f"{called(unit)} is held {how} {holders}"
    if kubelet:
        return Reason(
            Code.GPU_BUSY,
            f"{held}, and the kubelet allocated it to this pod too, in {asked} mode",
            cure=f"wait until it is free, or {_ANOTHER_GPU}",
        )
    return Reason(
        Code.GPU_BUSY,
        f"{held}, and asked for here in {asked} mode",
        cure=f"wait until it is free, ask for other GPUs, or set {_cure(asked, {usage.mode})}",
    )


def in_rollout(reason: Reason, pod: Pod, usage: Iterable[Usage]) -> Reason:
    """Name in a refusal the pod to delete, where a Deployment's new pod waits for a GPU of the one that it replaces.

    A rolling update deletes that only once the new pod is ready. Pods are called `NAME-HASH-RANDOM`.
    """
    ours = pod.labels.get(TEMPLATE_HASH, "")
    name, is_named, _ = pod.name.rpartition(f"-{ours}-")
    if reason.code is not Code.GPU_BUSY or not (ours and is_named):
        return reason
    for holder in chain.from_iterable(use.holders for use in usage):
        before, _, random = holder.pod_name.removeprefix(f"{name}-").partition("-")
        alike = holder.pod_name == f"{name}-{before}-{random}" and len(random) == RANDOM_LENGTH
        if alike and holder.namespace == pod.namespace and before != ours:
            which = f"{holder.namespace}/{holder.pod_name}"
            cure = (
                f"delete {which} if this pod replaces it (a Deployment does with strategy: Recreate), or {reason.cure}"
            )
            longer = replace(reason, cure=cure)
            return longer if longer.fits else reason
    return reason


def no_share(unit: Unit, replicas: int, usage: Usage) -> Reason:
    """Refuse: no share of the unit is left."""
    return Reason(
        Code.GPU_BUSY,
        f"{called(unit)} has {replicas} shares (dra.replicas), all taken by {_holders(usage)}",
        cure="wait until one of them ends, or delete its pods",
    )


def _holders(usage: Usage, pod_uid: PodUid | None = None) -> str:
    """Name the holders but that pod, which asks."""
    others = [name for uid, name in usage.pods.items() if uid != pod_uid]
    others = [*others, *usage.idle_claims] or list(usage.pods.values())
    return named_few([*others, *_openers(usage)], HOLDERS_SHOWN, HOLDER_SHOWN_MAX)


def _openers(usage: Usage) -> Iterable[str]:
    """Name the containers that can open the GPU, but for those of pods that are named among its holders."""
    return (opener(each) for each in usage.external.values() if each.pod not in usage.pods.values())


def opener(other: ExternalAllocation) -> str:
    """Name a container that can open a GPU which it was not granted, why, and how many GPUs it keeps from others."""
    pod = clipped(other.pod, OPENING_POD_SHOWN_MAX)
    if other.device:
        return f"{pod} (by a claim of {NVIDIA_DRIVER}, {clipped(other.device, PREPARED_SHOWN_MAX)})"
    if not other.container:
        name = f", whose container {clipped(other.name, EXTERNAL_CONTAINER_SHOWN_MAX)}" if other.name else ", which"
        return f"{pod} (not through nri-gpu){name} opens {number_of(other.held)}"
    name = clipped(other.container, OPENING_CONTAINER_SHOWN_MAX)
    return f"{pod} (container {name} still opens its device number)"


def number_of(uuids: Collection[str]) -> str:
    """Return `4 GPUs`; the MIG devices of a GPU count only if no whole GPU is among the UUIDs."""
    gpus = [uuid for uuid in uuids if not uuid.startswith("MIG-")]
    return counted(len(gpus), "GPU") if gpus else counted(len(uuids), "MIG device")


def _shown(releasing: Releasing) -> str:
    return str(replace(releasing, pod=clipped(releasing.pod, NAME_SHOWN_MAX)))


def _cure(asked: Mode, held: Set[Mode | None]) -> str:
    """Return the mode that would let both containers have the GPU."""
    if Mode.MPS in (asked, *held):
        return "the same mode on both"
    if asked is Mode.SHARED:
        return "mode=shared on the holder"
    return "mode=shared on both" if Mode.EXCLUSIVE in held else "mode=shared here"


def all_busy(
    asked: str, mode: Mode, fitting: Sequence[Unit], open_ones: Sequence[Unit], usage: Mapping[GpuUuid, Usage]
) -> Reason:
    """Refuse: too few of the fitting units are free. asked: `2 GPUs`."""
    taken = [usage[gpu.uuid] for gpu in fitting if gpu not in open_ones]
    fewer = "ask for fewer, " if open_ones else ""
    left = [each.releasing for each in taken if each.releasing and not (each.pods or each.external or each.idle_claims)]
    if len(left) == len(taken):
        asked = f"asked for {asked}, but of the {len(fitting)} that fit {len(open_ones) or 'none'}"
        return _all_releasing(asked, left, fewer)
    names = [name for each in taken for name in (*each.pods.values(), *each.idle_claims)]
    names += [f"{each.pod} (just released)" for each in left]
    names += chain.from_iterable(map(_openers, taken))
    holders = named_few(sorted(names), HOLDERS_SHOWN, HOLDER_SHOWN_MAX)
    cure = _cure(mode, {each.mode for each in taken})
    return Reason(
        Code.GPU_BUSY,
        f"asked for {asked} in {mode} mode, but of the {len(fitting)} that fit {len(open_ones) or 'none'} can be "
        f"granted now; {'the others' if open_ones else 'they'} are held by {holders}",
        cure=f"wait until one is free, {fewer}or set {cure}",
    )


def _all_releasing(asked: str, left: Sequence[Releasing], fewer: str) -> Reason:
    pods = "; ".join(list(dict.fromkeys(map(_shown, left)))[:HOLDERS_SHOWN])
    return Reason(
        Code.GPU_BUSY,
        f"{asked} can be granted now; the others were just released by {pods}; other pods can have them once no "
        f"process uses them, or {max(each.grace_s for each in left):g} s after their release",
        cure=f"{fewer}{'or ' if fewer else ''}wait until then",
    )


def too_few(gpus: int, claim: Claim, fitting: Sequence[Gpu], inventory: Inventory) -> Reason:
    """Refuse: the node has fewer GPUs than asked for, held or not."""
    which = " that fit the selectors" if claim.selectors else " that can be granted"
    has = f"{len(fitting)}{which}{_hidden(inventory, claim)}"
    return Reason(
        Code.NO_SUCH_GPU,
        f"asked for {counted(gpus, 'GPU')}, but this node has {has}",
        cure="ask for fewer, or run the pod on another node",
    )


def too_few_parts(wanted: MigProfile, claim: Claim, inventory: Inventory) -> Reason:
    """Refuse: the node has fewer MIG devices of that profile than asked for, held or not.

    The refusal says what there is.
    """
    doubts = {part.uuid: why_not(part) or _why_unknown(part, claim.selectors) for part in inventory.parts}
    there = [part for part in inventory.parts if matches(part, claim.selectors) or _why_unknown(part, claim.selectors)]
    usable = [part for part in there if not doubts[part.uuid]]
    fitting = sum(part.device.profile == wanted.profile for part in usable)
    profiles = sorted({part.device.profile for part in usable})
    known = ", ".join(f"{sum(part.device.profile == name for part in usable)} of {name}" for name in profiles)
    has = f"{counted(fitting, 'MIG device') if fitting else 'no MIG devices'} of profile {wanted.profile}"
    but = f" (it has {clipped(known, WHY_SHOWN_MAX)})" if known else ""
    bad = [f"{part.place}: {clipped(why, NAME_SHOWN_MAX)}" for part in there if (why := doubts[part.uuid])]
    bad_ones = f" (unavailable: {'; '.join(bad[:HIDDEN_SHOWN])})" if bad else ""
    return Reason(
        Code.NO_SUCH_GPU,
        f"asked for {wanted.devices}, but this node has {has}"
        f"{' that fit the selectors' * bool(claim.selectors)}{but}{bad_ones}",
        cure="ask for another profile, create such MIG devices on the node, or run the pod on another node",
    )


def none_fit(claim: Claim, inventory: Inventory) -> Reason:
    """Refuse: no GPU that can be granted fits."""
    if claim.selectors and any(not why_not(gpu) for gpu in inventory.gpus):
        has = named_few(sorted({gpu.model for gpu in inventory.gpus}), HOLDERS_SHOWN) + _hidden(inventory, claim)
        return Reason(
            Code.NO_SUCH_GPU,
            f"no GPU of this node fits {clipped(claim.text, NAME_SHOWN_MAX)!r}; it has {has}",
            cure="loosen the selectors, or run the pod on another node",
        )
    return Reason(
        Code.NO_SUCH_GPU,
        f"this node has no GPU that can be granted{_hidden(inventory)}",
        cure="run the pod on another node, or see `nri-gpu gpus` and `nvidia-smi` on this one",
    )


def _hidden(inventory: Inventory, claim: Claim | None = None) -> str:
    """List the GPUs that cannot be granted, or not compared with the claim's selectors, in brackets."""
    selectors = claim.selectors if claim else ()
    bad = [(str(gpu.index), why) for gpu in inventory.gpus if (why := why_not(gpu) or _why_unknown(gpu, selectors))]
    bad += [(str(fault.index), fault.reason) for fault in inventory.faults]
    bad += [(gpu.pci_bus_id, gpu.reason) for gpu in inventory.unlisted]
    said = "; ".join(f"GPU {name}: {clipped(why, NAME_SHOWN_MAX)}" for name, why in bad[:HIDDEN_SHOWN])
    return f" ({said})" if bad else ""


def answer_too_large(size_bytes: int, most_bytes: int) -> Reason:
    """Return why a container cannot be answered. most_bytes: of an answer."""
    return Reason(
        Code.REQUEST_TOO_LARGE,
        f"the answer to the runtime would have {size_bytes} bytes, and a message holds {most_bytes}",
        cure="shorten the container's LD_LIBRARY_PATH, which the answer repeats, or ask for fewer GPUs and extras",
    )
