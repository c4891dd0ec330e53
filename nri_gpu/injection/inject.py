"""The whole of what is added to one container: each part makes its edits, and one merge puts them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from nri_gpu.domain.container import Container
from nri_gpu.domain.edits import NO_EDITS, Edits
from nri_gpu.domain.gpu import Capabilities, Capability, Unit, gpus_of
from nri_gpu.domain.gpu_request import NumaBinding
from nri_gpu.domain.mps import Seat
from nri_gpu.domain.node import CompatPackage, DriverTree, Inventory, Loader, NumaNode
from nri_gpu.injection import device_nodes
from nri_gpu.injection.driver_mounts import compat_edits, compat_folder_edits, driver_edits
from nri_gpu.injection.mps_client import client_edits

VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
OUR_UUIDS: Final = "NRI_GPU_UUIDS"
VOID: Final = "void"  # NVIDIA's value for no device: an old runtime or hook on the node then does nothing


class Injection(Struct, frozen=True, kw_only=True):
    """The input of a container's edits. The signed grant is added later, by whoever has the key."""

    container: Container
    gpus: tuple[Unit, ...]  # GPUs and MIG devices, in NVML order
    capabilities: Capabilities  # closed
    inventory: Inventory
    tree: DriverTree | None  # the staged driver files for `capabilities`
    loader: Loader  # how a container's loader finds the driver's files
    void: bool  # NVIDIA_VISIBLE_DEVICES is for other components: policy says so, or the pod's runtime handler
    hwcaps: bool = True  # as in `Node`
    numa: NumaBinding = NumaBinding.NONE  # what policy binds to the GPUs' NUMA nodes
    extra: Edits = NO_EDITS  # the edits of its extras
    compat: CompatPackage | None = None  # a newer CUDA than the driver's
    compat_folder: str = ""  # in the image, of a newer CUDA of its own
    completes: bool = False  # another component assigned the GPUs, so the container gets no node of a GPU
    mps: Seat | None = None  # its share of an MPS daemon


def plan(of: Injection) -> Edits:
    """Return all that is added to the container, each path and key once."""
    driver = _driver(of)
    parts = [_devices(of), driver]
    if of.compat:
        parts.append(compat_edits(of.compat, driver, of.container))
    elif of.compat_folder:
        parts.append(compat_folder_edits(of.compat_folder, driver, of.container))
    parts += [Edits(env=visible_devices(of.gpus, void=of.void)), of.extra]
    if of.mps:
        parts.append(client_edits(of.mps))
    if not of.container.pinned:
        parts.append(cpuset_edits(of.gpus, of.inventory.numa, of.numa))
    return Edits.merged(parts)


def _devices(of: Injection) -> Edits:
    majors = of.inventory.majors
    if of.completes:
        present = {device.path for device in of.container.devices}
        shared = device_nodes.shared_nodes(of.capabilities, majors)
        return Edits.of(devices=tuple(node for node in shared if node.path not in present))
    return Edits.of(devices=device_nodes.device_nodes(of.gpus, of.capabilities, majors))


def _driver(of: Injection) -> Edits:
    if of.tree is None:
        return NO_EDITS
    compatible = Capability.COMPAT32 in of.capabilities
    return driver_edits(of.tree, of.loader, of.container, hwcaps=of.hwcaps, compatible=compatible)


def cpuset_edits(units: Iterable[Unit], nodes: Sequence[NumaNode], binding: NumaBinding) -> Edits:
    """Return the cpuset of a container that is granted these, unless another component has set it.

    It stays unbound if the NUMA node of a GPU is not known: the others' nodes would keep the container away from that
    GPU. A node without CPUs, or without memory, adds none, since the kernel refuses an empty list.
    """
    if binding is NumaBinding.NONE:
        return NO_EDITS
    wanted = {gpu.numa_node for gpu in gpus_of(units)}
    near = [node for node in nodes if node.number in wanted]
    if len(near) < len(wanted):
        return NO_EDITS
    cpus = [node.cpus for node in near if node.cpus] if binding is not NumaBinding.MEMORY else []
    mems = [str(node.number) for node in near if node.memory] if binding is not NumaBinding.CPUS else []
    return Edits(cpuset_cpus=",".join(cpus), cpuset_mems=",".join(mems))


def visible_devices(gpus: tuple[Unit, ...], *, void: bool) -> Mapping[str, str]:
    """Return the variables with the granted UUIDs.

    void: under another name, because a runtime or hook on this node still reads the usual one.
    """
    uuids = ",".join(gpu.uuid for gpu in gpus)
    return {VISIBLE_DEVICES: VOID, OUR_UUIDS: uuids} if void else {VISIBLE_DEVICES: uuids}


def disarmed(env: Mapping[str, str]) -> Mapping[str, str]:
    """Override an image's NVIDIA_VISIBLE_DEVICES, so that no other component acts on it."""
    return {VISIBLE_DEVICES: VOID} if env.get(VISIBLE_DEVICES, VOID) != VOID else {}
