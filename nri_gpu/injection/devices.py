"""Device nodes: the GPUs granted, and the driver's shared nodes that they are useless without."""

from __future__ import annotations

from typing import Final

from nri_gpu.domain.decision import Code, Reason
from nri_gpu.domain.edits import DeviceNode
from nri_gpu.domain.gpu import Capabilities, Capability, Gpu, Inventory, Majors

# Minors that the driver fixes: NVIDIA/open-gpu-kernel-modules kernel-open/common/inc/nv-chardev-numbers.h and
# kernel-open/nvidia-uvm/uvm_common.h. Majors are never constants here: the driver's are dynamic but one.
NVIDIACTL_MINOR: Final = 255
UVM_MINOR: Final = 0
UVM_TOOLS_MINOR: Final = 1


def missing_modules(capabilities: Capabilities, inventory: Inventory) -> Reason | None:
    """Why nodes cannot be given whole: a GPU without nvidia-uvm starts, and then fails in the program."""
    if inventory.majors.nvidia is None:
        return _not_loaded("nvidia", "modprobe nvidia")
    if Capability.COMPUTE in capabilities and inventory.majors.nvidia_uvm is None:
        return _not_loaded("nvidia-uvm", "modprobe nvidia-uvm")
    return None


def device_nodes(gpus: tuple[Gpu, ...], capabilities: Capabilities, majors: Majors) -> tuple[DeviceNode, ...]:
    """Nodes for these GPUs; nothing for no GPUs. `missing_modules` has been asked before."""
    if not gpus or majors.nvidia is None:
        return ()
    nodes = [DeviceNode(f"/dev/nvidia{gpu.minor_number}", majors.nvidia, gpu.minor_number) for gpu in gpus]
    nodes.append(DeviceNode("/dev/nvidiactl", majors.nvidia, NVIDIACTL_MINOR))
    if Capability.COMPUTE in capabilities and majors.nvidia_uvm is not None:
        nodes.append(DeviceNode("/dev/nvidia-uvm", majors.nvidia_uvm, UVM_MINOR))
        nodes.append(DeviceNode("/dev/nvidia-uvm-tools", majors.nvidia_uvm, UVM_TOOLS_MINOR))
    return tuple(nodes)


def _not_loaded(module: str, fix: str) -> Reason:
    return Reason(
        Code.NODE_NOT_READY,
        f"kernel module {module} is not loaded on this node (not in /proc/devices): run `{fix}` on it; "
        "the container can be created again right after.",
    )
