"""Released GPUs, and what looks at their processes found."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, repeat
from typing import Final

from nri_gpu.domain.gpu import Gpu, GpuUuid, MigDevice, described
from nri_gpu.domain.node import Inventory
from nri_gpu.ledger.holders import Releasing
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.system.cgroups import ContainerCgroups

PIDS_MAX: Final = 4096  # of a monitor's container


class ReleasedGpus:
    """The processes that looks find on released GPUs. counted: the GPUs whose processes the newest look could tell."""

    def __init__(self, cgroups: ContainerCgroups) -> None:
        self.counted: frozenset[GpuUuid] = frozenset()
        self._cgroups = cgroups

    def looked(self, inventory: Inventory, ledger: Ledger) -> Mapping[GpuUuid, int]:
        """Count the processes on each releasing GPU that may be of the container that left it.

        Left out are processes that were there before the container's first one, and processes of monitors, as far as
        NVML tells them by our PIDs. GPUs whose processes the look cannot tell are absent.
        """
        units = {each.uuid: each for each in map(described, inventory.units) if each.processes is not None}
        self.counted = frozenset(units)
        releasing = ledger.releasing.items()
        return {uuid: self._processes(units[uuid], left, ledger) for uuid, left in releasing if uuid in units}

    def _processes(self, unit: Gpu | MigDevice, left: Releasing, ledger: Ledger) -> int:
        first = 0 if left.first_started is None else left.first_started
        monitors = self._monitors_pids(unit.uuid, ledger)
        told = zip(unit.started, chain(unit.pids, repeat(0)), strict=False)
        return (unit.processes or 0) - sum(started < first or pid in monitors for started, pid in told)

    def _monitors_pids(self, uuid: GpuUuid, ledger: Ledger) -> frozenset[int]:
        """Return the PIDs in the cgroups of containers that open a GPU and do not hold it."""
        watching = (id_ for id_, each in ledger.external.items() if uuid in each.watched)
        processes = (process for id_ in watching if (process := ledger.processes.get(id_)) and process.cgroup)
        return frozenset(chain.from_iterable(self._cgroups.pids(each, PIDS_MAX) for each in processes))
