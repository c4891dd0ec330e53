"""Where an inventory comes from: NVML, or a topology file."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from nri_gpu.domain.node import Inventory
from nri_gpu.inventory.source import NvmlSource


class TopologySource:
    """A topology file: the node is simulated. Read anew each time, so that an edit is seen.

    clock: for the file's changes, which count from here.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(path)
        self._wall = wall
        self._clock = clock
        self._began = clock()
        self._times: tuple[float, ...] = ()
        self.answered: Hashable = None  # needs no head start

    async def refresh(self) -> Inventory:
        """The file's node as it is by now. Raises: TopologyError; InventoryError: a fault that the file plays."""
        from nri_gpu.simulation.topology import load_scene  # a dozen modules that a real node does without

        scene = load_scene(self._path, wall=self._wall)
        self._times = tuple(change.at_s for change in scene.changes)
        return scene.after(self._clock() - self._began)

    def glance(self) -> Hashable:
        """Another one each time that the file, or by its own words the node, is another one."""
        elapsed_s = self._clock() - self._began
        due = sum(at_s <= elapsed_s for at_s in self._times)
        try:
            found = self._path.stat()
        except OSError:
            return due, None
        return due, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    async def close(self) -> None:
        """Nothing was opened."""


def source_of(
    topology: str | Path | None, driver_root: str | Path, library_dirs: Sequence[str] = (), *, host_root: str = ""
) -> TopologySource | NvmlSource:
    """A topology file's node where one is named, else this machine. host_root: as in the policy's [driver]."""
    return TopologySource(topology) if topology else NvmlSource(driver_root, library_dirs, host_root=host_root)
