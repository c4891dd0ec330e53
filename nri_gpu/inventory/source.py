"""Where an inventory comes from: one interface, two sources."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from loguru import logger
from msgspec.structs import replace

from nri_gpu.domain.errors import InventoryError
from nri_gpu.domain.node import Inventory, KernelGpu
from nri_gpu.inventory.child import Aside, Deadlines, Limit, NvmlChild
from nri_gpu.inventory.extras import PROC, as_host_names, find_offers, roots_of, unusual, with_minors
from nri_gpu.inventory.kernel import PROC_DEVICES, Places, glance, host_majors, numa_nodes, unlisted_gpus


class Source(Protocol):
    """Somebody who knows what GPUs there are."""

    async def refresh(self) -> Inventory:
        """What there is now.

        Raises: InventoryError.
        """

    async def close(self) -> None:
        """Lets go of whatever was needed to ask."""


class NvmlSource:
    """The machine itself: GPUs from NVML, majors, NUMA nodes and the minors of MIG's capabilities from the kernel."""

    def __init__(
        self,
        driver_root: str | Path,
        library_dirs: Sequence[str] = (),
        *,
        host_root: str = "",
        proc_devices: str = PROC_DEVICES,
        proc: str | Path = PROC,
        sysfs: str = "/sys",
        deadlines: Deadlines | None = None,
        wall: Callable[[], float] = time.time,
        limit: Limit = asyncio.timeout,
    ) -> None:
        self._child = NvmlChild(
            str(driver_root), library_dirs, sysfs=sysfs, deadlines=deadlines, wall=wall, limit=limit
        )
        self._proc_devices = proc_devices
        self._proc = Path(proc)
        self._sysfs = Path(sysfs)
        self._roots = roots_of(Path(driver_root), host_root, proc=self._proc, sys=self._sysfs)
        self._host_root = host_root
        self._places = Places(proc=self._proc, sys=self._sysfs)
        self._aside = Aside((deadlines or Deadlines()).files_s, limit)
        self._said: tuple[str, ...] = ()
        self._lacking: set[tuple[str, str]] = set()  # driver version and function
        self.answered: Hashable = None  # the glance from before the last answer was asked for

    async def refresh(self) -> Inventory:
        """What NVML and the kernel say now. Raises: InventoryError."""
        before = await self._aside.run("a glance at the kernel's files", self.glance)
        try:
            inventory = await self._child.refresh()
        except InventoryError as error:
            raise InventoryError(str(error), await self._without_nvml(str(error))) from error
        self._tell_lacking(inventory.driver_version)
        # After NVML: its start may be what loads the module.
        inventory = await self._aside.run(
            "reading the driver's files in /proc and /sys", partial(self._whole, inventory)
        )
        self._tell_unusual(inventory)
        self.answered = before
        return inventory

    def _whole(self, inventory: Inventory) -> Inventory:
        """With what files tell, some of which are the driver's own. Raises: InventoryError."""
        majors, gpus = host_majors(self._proc_devices), with_minors(inventory.gpus, self._proc)
        offers = find_offers(self._roots, inventory.driver_version)
        if self._host_root:
            offers = as_host_names(offers, self._roots.driver, Path(self._host_root))
        listed, nameless = {gpu.pci_bus_id for gpu in gpus}, len(inventory.faults)
        return replace(
            inventory,
            majors=majors,
            gpus=gpus,
            numa=numa_nodes(gpus, self._sysfs),
            extras=offers,
            unlisted=unlisted_gpus(self._places, listed, nameless=nameless),
        )

    async def _without_nvml(self, fault: str) -> tuple[KernelGpu, ...]:
        """What can be named all the same."""
        with contextlib.suppress(InventoryError):
            look = partial(unlisted_gpus, self._places, (), fault=fault)
            return await self._aside.run("reading what the kernel shows of GPUs", look)
        return ()

    def _tell_unusual(self, inventory: Inventory) -> None:
        """What is odd, once, until it changes."""
        said, self._said = self._said, unusual(inventory.gpus)
        for sentence in self._said:
            if sentence not in said:
                logger.bind(fault=sentence).warning("odd capability minors, believed")

    def _tell_lacking(self, version: str) -> None:
        """Once for each driver, however often its library is asked."""
        if fresh := [each for each in self._child.lacking if (version, each) not in self._lacking]:
            self._lacking |= {(version, each) for each in fresh}
            bound = logger.bind(driver_version=version, fault=", ".join(fresh))
            bound.info("this driver's nvml lacks functions; what they tell is asked otherwise, or not known")

    def glance(self) -> Hashable:
        """What the kernel shows without asking the driver."""
        return glance(self._places)

    async def close(self) -> None:
        """Ends the NVML process."""
        await self._child.close()
