"""A topology file as the source of an inventory, and the choice between it and this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from nri_gpu.domain.node import Inventory
from nri_gpu.domain.value import canonical
from nri_gpu.inventory.nvml_source import NvmlSource
from nri_gpu.system.storage import signature


class TopologySource:
    """A simulated node. Its file is read again each time, so that an edit is noticed.

    clock: for the file's changes, whose times count from now.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._began = clock()
        self._times: tuple[float, ...] = ()
        self._majors = ""  # as last seen
        self.starts = 0  # it needs no process
        self.answered: Hashable = None  # a simulated node has no kernel view to compare with

    async def refresh(self) -> Inventory:
        """Return the file's node as it is now. Raises: TopologyError; InventoryError, if its driver does not answer."""
        from nri_gpu.inventory.topology_file import load_scenario  # a real node does without these modules

        scenario = load_scenario(self._path)
        self._times = tuple(change.at_s for change in scenario.changes)
        inventory = scenario.after(self._clock() - self._began)
        self._majors = canonical(inventory.majors)
        return inventory

    def kernel_view(self) -> Hashable:
        """Return a different value each time that the file, or the node that it describes, changed."""
        elapsed_s = self._clock() - self._began
        due = sum(at_s <= elapsed_s for at_s in self._times)
        return due, signature(self._path)

    def module_load(self) -> str:
        """Return the majors in place of a load: a module that is loaded again may have others."""
        return self._majors

    async def close(self) -> None:
        """Do nothing: nothing was opened."""


def source_of(
    topology: str | Path | None, driver_root: str | Path, library_dirs: Sequence[str] = (), *, host_root: str = ""
) -> TopologySource | NvmlSource:
    """Return the topology file's node if there is one, else this machine. host_root: as in the policy's [driver]."""
    return TopologySource(topology) if topology else NvmlSource(driver_root, library_dirs, host_root=host_root)


def ask_once(source: TopologySource | NvmlSource) -> Inventory:
    """Return the source's node now, for a command that ends then. Raises: InventoryError."""

    async def ask() -> Inventory:
        try:
            return await source.refresh()
        finally:
            await source.close()

    return asyncio.run(ask())
