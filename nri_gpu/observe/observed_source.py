"""GPUs of the machine as an observer sees them: by NVML, and without it by what the driver shows in /proc."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Final

from nri_gpu.domain.bounds import UNKNOWN_MODEL
from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.gpu import Gpu, GpuUuid
from nri_gpu.domain.node import Inventory, KernelGpu
from nri_gpu.host.kernel_view import HostFolders, host_majors
from nri_gpu.host.modules import module_versions
from nri_gpu.inventory.nvml_source import NvmlSource
from nri_gpu.system.clocks import since_boot_s

NOT_SEEN: Final = "memory, utilization, health and MIG devices of the GPUs are not seen"
OF_THE_GRADE: Final = (
    "an observer that is not privileged has no NVML: set the chart's observe.nvml=true to see them (it is then root on "
    "the node)"
)
NO_DRIVER: Final = "the driver shows no GPU below /proc/driver/nvidia/gpus: none is there, or its module is not loaded"


class ObservedSource:
    """The machine. without: what is not seen for want of NVML, and why; or empty.

    may_open: false for a pod that is not privileged, which opens no node of the driver's.
    """

    def __init__(self, nvml: NvmlSource, *, may_open: bool = True, folders: HostFolders | None = None) -> None:
        self._nvml = nvml
        self._may_open = may_open
        self._folders = folders or HostFolders()
        self.without = ""

    async def refresh(self) -> Inventory:
        """Return what NVML reports, else what the driver shows. Raises: InventoryError."""
        try:
            inventory = await self._nvml.refresh()
        except InventoryError as error:
            gpus = tuple(_gpus(error.unlisted))
            if not gpus:
                self.without = ""
                raise error if self._may_open else InventoryError(NO_DRIVER, error.unlisted) from error
            self.without = f"{NOT_SEEN}: {error if self._may_open else OF_THE_GRADE}"
            named = {gpu.pci_bus_id for gpu in gpus}
            versions = module_versions(self._folders.sys)
            return Inventory(
                taken_at=since_boot_s(),
                gpus=gpus,
                majors=host_majors(self._folders.proc),
                driver_version=versions.get("nvidia", ""),
                modules=versions,
                unlisted=tuple(each for each in error.unlisted if each.pci_bus_id not in named),
            )
        self.without = ""
        return inventory

    def kernel_view(self) -> Hashable:
        return self._nvml.kernel_view()

    @property
    def starts(self) -> int:
        return self._nvml.starts

    async def close(self) -> None:
        await self._nvml.close()


def _gpus(shown: Iterable[KernelGpu]) -> Iterator[Gpu]:
    """Yield the GPUs that the driver names, in PCI order, which is NVML's."""
    named = (each for each in shown if each.uuid and each.minor_number is not None and each.missing)
    for index, each in enumerate(sorted(named, key=lambda gpu: gpu.pci_bus_id)):
        assert each.minor_number is not None
        yield Gpu(
            index=index,
            minor_number=each.minor_number,
            uuid=GpuUuid(each.uuid),
            pci_bus_id=each.pci_bus_id,
            model=each.model or UNKNOWN_MODEL,
        )
