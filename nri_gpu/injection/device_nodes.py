"""Device nodes: those of the granted GPUs, and the driver's shared nodes that every program needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from posixpath import normpath
from typing import Final

from nri_gpu.domain.bounds import MODESET_MINOR, NVIDIACTL_MINOR
from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import DeviceNode
from nri_gpu.domain.gpu import Capabilities, Capability, Gpu, MigPart, Unit, gpus_of, whole
from nri_gpu.domain.node import Inventory, Majors

# Minors that the driver fixes (kernel-open/nvidia-uvm/uvm_common.h). Majors are never constants here.
UVM_MINOR: Final = 0
UVM_TOOLS_MINOR: Final = 1
NVIDIACTL, MODESET = "/dev/nvidiactl", "/dev/nvidia-modeset"
UVM, UVM_TOOLS = "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"
# The capability of a MIG instance is an open file of that minor, which the driver lets everyone open for reading.
# kernel-open/nvidia/nv-caps.c, and DeviceFileMode in /proc/driver/nvidia/capabilities/gpu*/mig/gi*/access.
CAPABILITY_MODE: Final = 0o444
# Mounts of runtimes and the kubelet below /dev; none of them covers a node.
USUAL_MOUNTS: Final = frozenset({"/dev/pts", "/dev/shm", "/dev/mqueue", "/dev/termination-log"})


def missing_modules(capabilities: Capabilities, inventory: Inventory) -> Reason | None:
    """Name the missing kernel module, or return None: without nvidia-uvm a container starts, and its program fails."""
    if inventory.majors.nvidia is None:
        return _not_loaded("nvidia", "modprobe nvidia")
    if Capability.COMPUTE in capabilities and inventory.majors.nvidia_uvm is None:
        return _not_loaded("nvidia-uvm", "modprobe nvidia-uvm")
    if Capability.GRAPHICS in capabilities and inventory.majors.modeset is False:
        return _not_loaded("nvidia-modeset", "modprobe nvidia-modeset")
    return None


def missing_capability_major(gpus: Iterable[Unit], majors: Majors) -> Reason | None:
    """Return why MIG devices among these cannot be granted, or None.

    Without its capability nodes a MIG device can be opened, and then fails.
    """
    if majors.nvidia_caps is not None or not any(isinstance(unit, MigPart) for unit in gpus):
        return None
    return Reason(
        Code.NODE_NOT_READY,
        "nvidia-caps has no major on this node (not in /proc/devices), so MIG devices cannot be granted",
        cure="load kernel module nvidia again on it, and see `dmesg | grep NVRM`",
    )


def covered_node(nodes: Iterable[str], mounts: Iterable[str]) -> Reason | None:
    """Return why a node of these would be missing, or None: the container mounts a volume at its path, or above it.

    runc makes nodes after mounts. In a volume it leaves them on the host, in place of a mounted file it makes none, and
    in a mounted /dev none at all (opencontainers/runc: libcontainer/rootfs_linux.go, createDevices).
    """
    volumes = [normpath(f"/./{each}") for each in mounts if "dev" in each and each not in USUAL_MOUNTS]
    node = next((node for node in nodes if any(f"{node}/".startswith(f"{each}/") for each in volumes)), None)
    if node is None:
        return None
    return Reason(
        Code.VOLUME_IN_THE_WAY,
        f"the container mounts a volume at {node} or above it, where the GPU's node belongs",
        cure="mount it elsewhere, or leave out of capabilities= what needs that node",
    )


def device_nodes(gpus: tuple[Unit, ...], capabilities: Capabilities, majors: Majors) -> tuple[DeviceNode, ...]:
    """Return the nodes for these GPUs and MIG devices; nothing if there are none.

    capabilities: closed. `missing_modules` has been checked before.
    """
    if not gpus or majors.nvidia is None:
        return ()
    minors = dict.fromkeys(gpu.minor_number for gpu in gpus_of(gpus))
    nodes = [DeviceNode(f"/dev/nvidia{minor}", majors.nvidia, minor) for minor in minors]
    nodes += shared_nodes(capabilities, majors)
    if Capability.GRAPHICS in capabilities:
        nodes.extend(node for unit in gpus if draws(unit) for node in drm_nodes(whole(unit)))
    return (*nodes, *_capability_nodes(gpus, majors.nvidia_caps))


def shared_nodes(capabilities: Capabilities, majors: Majors) -> Iterator[DeviceNode]:
    """Yield the nodes that programs use all GPUs through; alone they give access to none. capabilities: closed."""
    if majors.nvidia is None:
        return
    yield DeviceNode(NVIDIACTL, majors.nvidia, NVIDIACTL_MINOR)
    if Capability.COMPUTE in capabilities and majors.nvidia_uvm is not None:
        yield DeviceNode(UVM, majors.nvidia_uvm, UVM_MINOR)
        yield DeviceNode(UVM_TOOLS, majors.nvidia_uvm, UVM_TOOLS_MINOR)
    if Capability.GRAPHICS in capabilities:
        yield DeviceNode(MODESET, majors.nvidia, MODESET_MINOR)


def _capability_nodes(gpus: Iterable[Unit], major: int | None) -> Iterator[DeviceNode]:
    """Yield the nodes of the GPU instance and of the compute instance; never those to configure and monitor MIG."""
    devices = [unit.device for unit in gpus if isinstance(unit, MigPart)]
    pairs = ((device.gpu_instance_minor, device.compute_instance_minor) for device in devices)
    for minor in dict.fromkeys(minor for pair in pairs for minor in pair):
        if major is not None and minor is not None:
            yield DeviceNode(f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor, CAPABILITY_MODE)


def draws(unit: Unit) -> bool:
    """Return whether the nodes of the unit's GPU in /dev/dri come with it: only MIG devices that can draw get them.

    With any other MIG device they would open more than was granted. Source: the attribute `gfx` of a GPU instance's
    profile, which NVIDIA/nvidia-container-toolkit internal/platform-support/dgpu/nvml.go asks for too.
    """
    if isinstance(unit, Gpu):
        return True
    attributes = unit.device.profile.partition("+")[2]
    return any("gfx" in part.partition("-")[0].split(".") for part in attributes.split("+"))


def drm_nodes(gpu: Gpu) -> Iterator[DeviceNode]:
    """Yield each node by its name and by the GPU's PCI path, where hosts have a link: NRI makes nodes and no links.

    On the host they belong to the groups video and render, whose numbers an image does not share: here everyone may use
    them.
    """
    for node in gpu.drm:
        kind = "card" if node.name.startswith("card") else "render"
        yield DeviceNode(f"/dev/dri/{node.name}", node.major, node.minor)
        yield DeviceNode(f"/dev/dri/by-path/pci-{gpu.pci_bus_id}-{kind}", node.major, node.minor)


def two_versions(files: str, kernel: str) -> str:
    """Return the message for libraries and a loaded kernel module of different driver versions."""
    return (
        f"the driver's libraries on this node are {files} but its loaded kernel module is {kernel}: reload the module "
        "or reboot the node"
    )


def _not_loaded(module: str, fix: str) -> Reason:
    return Reason(
        Code.NODE_NOT_READY,
        f"kernel module {module} is not loaded on this node (not in /proc/devices)",
        cure=f"run `{fix}` on it; the container can be created again right after",
    )
