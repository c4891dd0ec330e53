"""The GPUs and MIG devices that device numbers give access to, also where NVML does not tell of MIG devices. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nri_gpu.domain.bounds import MODESET_MINOR
from nri_gpu.domain.container import DeviceNumber
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.node import Inventory
from nri_gpu.injection.device_numbers import unit_numbers

_OF_NO_PART: Final = frozenset({1, 2})  # minors of nvidia-caps that are no MIG device's: mig/config, mig/monitor


class UnitAccess:
    """The units of an inventory by their numbers. A GPU that is cut into MIG devices is none itself."""

    def __init__(self, inventory: Inventory) -> None:
        self._nvidia = inventory.majors.nvidia
        self._caps = inventory.majors.nvidia_caps
        self._cut = frozenset(gpu.uuid for gpu in inventory.gpus if gpu.mig)
        self.whole = frozenset(gpu.uuid for gpu in inventory.gpus)
        self._owners = dict(unit_numbers(inventory))
        self._number = {uuid: number for number, uuid in self._owners.items()}
        self._gpu_of = {part.uuid: gpu.uuid for gpu in inventory.gpus for part in gpu.mig}
        known = {part.gpu_instance_minor for gpu in inventory.gpus for part in gpu.mig}
        self._known_minors = _OF_NO_PART.union(minor for minor in known if minor is not None)
        self.units = {unit.uuid: unit for unit in inventory.units}
        self.usable = frozenset(self.units) - self._cut

    def opened(self, numbers: Iterable[DeviceNumber]) -> frozenset[GpuUuid]:
        """Return the units that a container with these numbers can use.

        A GPU's node and a capability of a MIG device that is not known here open a part of some GPU: none is returned.
        """
        found = frozenset(numbers)
        units = self.without_cut(self._owners[each] for each in found & self._owners.keys())
        if any(self._is_unknown_part(each) for each in found):
            units -= self.whole
        return units

    def _is_unknown_part(self, number: DeviceNumber) -> bool:
        return number[0] == self._caps and number not in self._owners and number[1] not in self._known_minors

    def without_cut(self, uuids: Iterable[GpuUuid]) -> frozenset[GpuUuid]:
        """Leave out GPUs that are cut into MIG devices: who has such a GPU's UUID has its parts, or none."""
        return frozenset(uuids) - self._cut

    def is_of_gpu(self, number: DeviceNumber) -> bool:
        """Return whether a number opens a GPU or a MIG device that is known here, and no node that all share."""
        return number in self._owners

    def is_gpus_node(self, number: DeviceNumber) -> bool:
        """Return whether a number is that of some GPU's node, known here or not."""
        return number[0] == self._nvidia and number[1] < MODESET_MINOR

    def numbers(self, uuids: Iterable[GpuUuid]) -> frozenset[DeviceNumber]:
        """Return the numbers that open these units and no others."""
        return frozenset(self._number[each] for each in uuids if each in self._number)

    def needed(self, uuid: GpuUuid) -> frozenset[DeviceNumber]:
        """Return the numbers by which a unit is used: its own, and for a MIG device its GPU's."""
        whole = self._gpu_of.get(uuid, uuid)
        return self.numbers((uuid, whole))
