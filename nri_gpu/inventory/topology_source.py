"""A topology file as the source of an inventory, and the choice between it and this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from pathlib import Path

from nri_gpu.domain.node import Inventory
from nri_gpu.domain.value import canonical
from nri_gpu.inventory.nvml_child import SampleSink
from nri_gpu.inventory.nvml_source import NvmlSource
from nri_gpu.system.storage import signature
from nri_gpu.system.tasks import LogOnce


class TopologySource:
    """A simulated node. Its file is read again each time, so that an edit is noticed."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._former = LogOnce()
        self._majors = ""  # as last seen
        self.starts = 0  # it needs no process
        self.answered: Hashable = None  # a simulated node has no kernel view to compare with

    async def refresh(self) -> Inventory:
        """Return the file's node as it is now. Raises: TopologyError."""
        from nri_gpu.inventory.topology_file import former_tables, load_topology  # a real node does without these

        inventory = load_topology(self._path)
        for finding in former_tables(self._path):
            self._former.note("topology file has tables that are ignored", finding.meaning)
        self._majors = canonical(inventory.majors)
        return inventory

    def kernel_view(self) -> Hashable:
        """Return a different value each time that the file changed."""
        return signature(self._path)

    def module_load(self) -> str:
        """Return the majors in place of a load: a module that is loaded again may have others."""
        return self._majors

    async def close(self) -> None:
        """Do nothing: nothing was opened."""


def source_of(
    topology: str | Path | None,
    driver_root: str | Path,
    library_dirs: Sequence[str] = (),
    *,
    host_root: str = "",
    stage_dir: str = "",
    samples: SampleSink | None = None,
) -> TopologySource | NvmlSource:
    """Return the topology file's node if there is one, else this machine.

    host_root, stage_dir: as in the policy's [driver]. samples: who takes what GPUs do; a simulated node's do nothing.
    """
    if topology:
        return TopologySource(topology)
    return NvmlSource(driver_root, library_dirs, host_root=host_root, stage_dir=stage_dir, samples=samples)


def ask_once(source: TopologySource | NvmlSource) -> Inventory:
    """Return the source's node now, for a command that ends then. Raises: InventoryError."""

    async def ask() -> Inventory:
        try:
            return await source.refresh()
        finally:
            await source.close()

    return asyncio.run(ask())
