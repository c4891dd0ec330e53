"""What others' device plugins and schedulers gave to a container, where policy has us inject it. Pure.

NVIDIA_VISIBLE_DEVICES never grants: images set it, and so may whoever makes a pod. The kubelet's own word does, by
PodResources; the variable has to agree with it, since both come of one Allocate.

    PodResources lists devices for the container    variable names them, or is not set    -> these
                                                    it names others, or all               -> refused
                                                    void, none                            -> nothing, as it says
    PodResources lists none for it                  whatever                              -> nothing
    PodResources has not told yet, or knows no pod  names devices                         -> refused for now
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from nri_gpu.allocation.foreign import GPU_NODE, nvidia_names
from nri_gpu.domain.container import Container, Pod
from nri_gpu.domain.gpu import GpuUuid, Inventory, MigPart
from nri_gpu.domain.kubelet import GROUP, REPLICA, Handed, KubeletGrant, PodGiven, gpu_groups
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.request.environment import MOUNTED_NAMES, VARIABLE, named_devices

SHOWN_MAX: Final = 3  # names in a sentence
NOT_TOLD: Final = (
    "it names GPUs as a device plugin does, and the kubelet has not told yet whether it gave this container any "
    "(PodResources): it will be tried again; see the log of `nri-gpu run` if it stays so"
)
# A kubelet that was just restarted does not know its pods yet, so that is no answer either.
NO_POD: Final = (
    "it names GPUs as a device plugin does, and the kubelet knows of no such pod (PodResources): a pod of its own will "
    "be tried again; one that was made past it has to leave that variable out"
)
TWO_HANDS: Final = (
    "the kubelet gave this container GPUs of nri-gpu's own resource and of another device plugin's: ask for one of the "
    "two in resources.limits"
)


class Told(Struct, frozen=True):
    """What the kubelet told so far. pod: of the container's pod; None for not yet.

    reserved: GPUs that pods in reservation namespaces hold -> the GPU groups of those pods.
    """

    pod: PodGiven | None = None
    reserved: Mapping[GpuUuid, frozenset[str]] = {}


def given_beside(
    container: Container, told: Told, inventory: Inventory, settings: KubeletSettings
) -> KubeletGrant | None:
    """What it was given by others, to be injected by us; None where that is nothing we could tell or should touch."""
    if not settings.beside or served_by_others(container):
        return None
    names = named_devices(container.env.get(VARIABLE, ""))
    if _is_fraction(container.pod, names, settings):
        return _fraction(container, names, told, inventory)
    return _of_plugin(container, names, told, inventory, settings) if settings.inject_for.patterns else None


def checked(given: KubeletGrant, container: Container, told: Told, settings: KubeletSettings) -> KubeletGrant:
    """What our own device plugin's tokens say, held against the kubelet's word where that is known."""
    said = told.pod.container(container.name) if told.pod else None
    if given.fault or said is None:
        return _reserving(given, container.pod, settings)
    if theirs(said.devices, settings):
        return KubeletGrant(fault=TWO_HANDS)
    for resource in dict.fromkeys(each.resource for each in given.devices):
        here = frozenset(each.id for each in given.devices if each.resource == resource)
        if here != (there := said.of(resource)):
            return KubeletGrant(
                fault=f"the kubelet says that it gave this container {_shown(there) or 'none'} of {resource}, and not "
                f"{_shown(here)}, which is signed on it: it was copied from another container; delete the pod to have "
                "the kubelet allocate anew"
            )
    return _reserving(given, container.pod, settings)


def served_by_others(container: Container) -> bool:
    """Whether somebody else injects here, or has: GPU nodes, CDI devices or hooks of NVIDIA's are on it."""
    nodes = not container.privileged and any(GPU_NODE.fullmatch(each.path) for each in container.devices)
    return nodes or bool(nvidia_names(container)) or bool(container.nvidia_hooks)


def theirs(devices: Iterable[Handed], settings: KubeletSettings) -> tuple[Handed, ...]:
    """Those of resources that are injected for others."""
    return tuple(each for each in devices if settings.inject_for.first(each.resource) is not None)


def reserves(namespace: str, settings: KubeletSettings) -> bool:
    """Whether pods there hold GPUs for others to share."""
    return bool(settings.reservations.patterns) and settings.reservations.first(namespace) is not None


def _of_plugin(
    container: Container, names: tuple[str, ...], told: Told, inventory: Inventory, settings: KubeletSettings
) -> KubeletGrant | None:
    if told.pod is None or not told.pod.containers:
        return _waits(NOT_TOLD if told.pod is None else NO_POD) if names else None
    named, odd = _units(names, container, inventory)
    if odd and not inventory.gpus:
        return _waits(f"what it names cannot be told yet: {inventory.fault or 'no GPU is known on this node'}")
    said = told.pod.container(container.name)
    if said is None:  # a plain init container, of whose devices the kubelet makes its pod's later ones
        devices = tuple(each for each in theirs(told.pod.devices, settings) if each.uuid in named)
    else:
        devices = theirs(said.devices, settings)
    if not devices:
        return KubeletGrant(key=VARIABLE) if names else None
    if VARIABLE in container.env and not names and "all" not in container.env[VARIABLE].split(","):
        return KubeletGrant(key=VARIABLE)  # void, none
    if VARIABLE in container.env and (odd or named != {each.uuid for each in devices}):
        return KubeletGrant(
            fault=f"it says {_cut(container.env[VARIABLE])}, and the kubelet gave this container "
            f"{_shown(each.id for each in devices)}: take the variable out of the pod's own environment",
            key=VARIABLE,
        )
    replicas = {REPLICA in each.id for each in devices}
    if len(replicas) > 1:
        return KubeletGrant(fault="the kubelet gave it shared GPUs and others at once: ask for one kind", key=VARIABLE)
    return _reserving(KubeletGrant(devices, replicas.pop(), key=VARIABLE), container.pod, settings)


def _is_fraction(pod: Pod, names: tuple[str, ...], settings: KubeletSettings) -> bool:
    if not names or not settings.reservations.patterns or reserves(pod.namespace, settings):
        return False
    return bool(gpu_groups(pod.labels))


def _fraction(container: Container, names: tuple[str, ...], told: Told, inventory: Inventory) -> KubeletGrant:
    groups = gpu_groups(container.pod.labels)
    named, odd = _units(names, container, inventory)
    lacking = [*odd, *sorted(uuid for uuid in named if told.reserved.get(uuid, frozenset()).isdisjoint(groups))]
    if lacking:
        return _waits(
            f"it names {_shown(lacking)}, which no pod in the namespaces of kubelet.reservations holds for this pod's "
            f"GPU group ({GROUP}): it will be tried again, since the kubelet may not have told yet"
        )
    by = f"fraction-{container.pod.uid}"  # a resource of its own: what the reservation holds stays the reservation's
    return KubeletGrant(tuple(Handed(by, uuid) for uuid in sorted(named)), shared=True, key=VARIABLE)


def _units(
    names: tuple[str, ...], container: Container, inventory: Inventory
) -> tuple[frozenset[GpuUuid], tuple[str, ...]]:
    """GPUs and MIG devices of these names, UUIDs or indices; and names of none that is known."""
    if names == (MOUNTED_NAMES,):
        below = f"{MOUNTED_NAMES}/"
        names = tuple(each.removeprefix(below) for each in container.mounts if each.startswith(below))
        names = tuple(each for each in names if not each.startswith("imex/"))
    known: dict[str, GpuUuid] = {unit.uuid: unit.uuid for unit in inventory.units}
    known |= {str(gpu.index): gpu.uuid for gpu in inventory.gpus}
    known |= {part.place: part.uuid for part in inventory.units if isinstance(part, MigPart)}
    return (
        frozenset(known[name] for name in names if name in known),
        tuple(sorted(name for name in names if name not in known)),
    )


def _reserving(given: KubeletGrant, pod: Pod, settings: KubeletSettings) -> KubeletGrant:
    """A pod that reserves a GPU holds it for others to share."""
    if given.fault or given.shared or not reserves(pod.namespace, settings):
        return given
    return KubeletGrant(given.devices, shared=True, key=given.key)


def _waits(sentence: str) -> KubeletGrant:
    return KubeletGrant(fault=sentence, key=VARIABLE, waits=True)


def _shown(names: Iterable[str]) -> str:
    some = sorted(names)
    return ", ".join(map(_cut, some[:SHOWN_MAX])) + (
        f" and {len(some) - SHOWN_MAX} more" if len(some) > SHOWN_MAX else ""
    )


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
