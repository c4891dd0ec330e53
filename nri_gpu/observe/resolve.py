"""The GPU or MIG device that a given device is, by the names that device plugins, DRA drivers and CDI have for it."""

from __future__ import annotations

import re
from typing import Final

from nri_gpu.domain.allocation import NVIDIA_DRIVER, REPLICA
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.names import is_nvidia_device
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.prepared import prepared_uuids
from nri_gpu.observe.given import GivenDevice

NONE: Final[frozenset[GpuUuid]] = frozenset()
_ALL: Final = "all"
_CLASSES: Final = ("/gpu", "/mig")  # of CDI; `nvidia.com/imex-channel=0` is no GPU
_PLACE: Final = re.compile("[0-9]{1,4}(:[0-9]{1,4})?")  # NVML's index of a GPU, or of a MIG device
_NODE: Final = re.compile("(?:/dev/)?nvidia([0-9]{1,6})(/.*)?")  # `/dev/nvidia0`; GKE's `nvidia0/gi1/vgpu2`
_INSTANCE: Final = re.compile("/gi([0-9]{1,4})(?:/.*)?")  # its GPU instance
# dra-driver-nvidia-gpu: cmd/gpu-kubelet-plugin/cdi.go. A `claim`'s device begins with the claim's UID.
_DRIVER_KIND: Final = re.compile("k8s[.]gpu[.]nvidia[.]com/(?:device|claim)")
_CLAIM_UID: Final = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}-")


def resolved(device: GivenDevice, inventory: Inventory) -> frozenset[GpuUuid]:
    """Return the GPUs and MIG devices that a given device is, of this node's; empty where its names tell none."""
    if device.id:
        return _of_id(device.id, inventory)
    if device.driver == NVIDIA_DRIVER and (found := prepared_uuids(device.device, inventory)):
        return found
    return NONE.union(*(resolved_cdi(each, inventory) for each in device.cdi))


def resolved_cdi(name: str, inventory: Inventory) -> frozenset[GpuUuid]:
    """Return the GPUs and MIG devices that a qualified CDI name is, `nvidia.com/gpu=0`; empty where it tells none."""
    kind, _, device = name.partition("=")
    if _DRIVER_KIND.fullmatch(kind):
        return prepared_uuids(_CLAIM_UID.sub("", device, count=1), inventory)
    if not is_nvidia_device(name) or not kind.endswith(_CLASSES):
        return _of_uuid(device, inventory)
    if device == _ALL:
        return frozenset(unit.uuid for unit in inventory.units)
    return _of_id(device, inventory)


def _of_id(id_: str, inventory: Inventory) -> frozenset[GpuUuid]:
    if found := _of_uuid(id_, inventory):
        return found
    id_ = id_.partition(REPLICA)[0]
    if _PLACE.fullmatch(id_):
        return frozenset(unit.uuid for unit in inventory.units if unit.place == id_)
    node = _NODE.fullmatch(id_)
    gpu = node and next((gpu for gpu in inventory.gpus if gpu.minor_number == int(node[1])), None)
    if not node or not gpu:
        return NONE
    instance = _INSTANCE.fullmatch(node[2] or "")
    if instance is None:
        return frozenset({gpu.uuid})
    return frozenset(part.uuid for part in gpu.mig if part.gpu_instance_id == int(instance[1]))


def _of_uuid(id_: str, inventory: Inventory) -> frozenset[GpuUuid]:
    """Return the unit of that UUID, which a replica's number may follow: `::2`, or `-2` with HAMi's device plugin."""
    uuids = (unit.uuid for unit in inventory.units)
    return frozenset(uuid for uuid in uuids if id_ == uuid or id_.startswith((f"{uuid}{REPLICA}", f"{uuid}-")))
