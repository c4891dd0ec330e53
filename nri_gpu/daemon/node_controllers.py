"""The controllers that keep the node state, inventory, health, driver files, MPS, labels, snapshot; and usage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Final

from nri_gpu.domain.container import ContainerId
from nri_gpu.domain.cordons import NO_CORDONS, marked
from nri_gpu.domain.node import Inventory
from nri_gpu.driver.driver_controller import DriverController
from nri_gpu.health.health_controller import HealthController
from nri_gpu.inventory.inventory_controller import InventoryCache, InventoryController
from nri_gpu.inventory.node_watch import DEV_FOLDERS, NodeWatch
from nri_gpu.inventory.topology_source import source_of
from nri_gpu.kubelet.node_labels import LabelController
from nri_gpu.mps.mps_controller import MpsController
from nri_gpu.nri.list_size import ListedContainer
from nri_gpu.policy.model import Policy
from nri_gpu.records.state_folder import StateFolder
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.usage.usage_controller import UsageController
from nri_gpu.verify.node_snapshot import EvidenceSource, SnapshotController

HEALTH_FILE: Final = "health.json"  # in the state folder


def restart_only(policy: Policy) -> Mapping[str, object]:
    """Return the settings and sections that hold for the life of the process, by their names in the policy."""
    driver = policy.driver
    return {
        "plugin.socket": policy.plugin.socket,
        "driver.root": driver.root,
        "driver.host_root": driver.host_root,
        "driver.library_dirs": driver.library_dirs,
        "driver.stage_dir": driver.stage_dir,
        "compat.dir": policy.compat.dir,
        "inventory.refresh_s": policy.inventory.refresh_s,
        "[audit]": policy.audit,
        "[kubelet]": policy.kubelet,
        "[dra]": policy.dra,
        "[metrics]": policy.metrics,
        "usage.dir": policy.usage.dir,
        "usage.keep_days": policy.usage.keep_days,
        "usage.keep_mib": policy.usage.keep_mib,
    }


class NodeControllers:
    """The node's controllers.

    fixed: the policy of the start. topology: a simulated node's file; None: this machine. containers: the runtime's.
    stages: whether containers can be given the driver's files.
    """

    def __init__(
        self,
        node_state: NodeState,
        fixed: Policy,
        folder: StateFolder,
        key: bytes,
        topology: Path | None,
        containers: Callable[[], Mapping[ContainerId, ListedContainer]],
        *,
        stages: bool = True,
    ) -> None:
        self._node_state = node_state
        self._fixed = fixed
        self._simulated = topology is not None
        driver = fixed.driver
        self.usage = UsageController(driver, node_state, simulated=self._simulated, containers=containers)
        self._source = source_of(
            topology,
            driver.root,
            driver.library_dirs,
            host_root=driver.host_root,
            stage_dir=driver.stage_dir,
            samples=self.usage.refreshed,
        )
        self._watch = NodeWatch(
            self._source.kernel_view, self._node_changed, folders=() if self._simulated else DEV_FOLDERS
        )
        self.inventory = InventoryController(node_state)
        self.health, self.cache = self._inventory_parts(folder)
        self.mps = MpsController(folder.path.absolute(), node_state)
        self._labels = LabelController(node_state, fixed.kubelet)
        self._driver = DriverController(
            fixed,
            folder.path,
            node_state,
            simulated=self._simulated,
            stages=stages,
            held=self._generations,
            module_changed=self._module_changed,
        )
        self._restored = False
        self._snapshots = SnapshotController(folder.path, key, self._evidence_source(), node_state)
        self._follow()

    def module_load(self) -> str:
        """Return which load of the driver's kernel module this is, or empty."""
        return self._source.module_load()

    def _inventory_parts(self, folder: StateFolder) -> tuple[HealthController, InventoryCache]:
        """Return who asks the source, and who judges the health in each answer; either may want another answer soon."""
        look = asyncio.Event()
        health = HealthController(
            self._fixed.driver,
            folder.path / HEALTH_FILE,
            self._node_state,
            publish=self.inventory.publish,
            refresh=look.set,
            simulated=self._simulated,
            module_load=self.module_load,
        )
        cache = InventoryCache(
            self._source,
            publish=self.inventory.publish,
            on_fault=self.inventory.not_refreshed,
            completed=health.with_health,
            refresh_s=self._fixed.inventory.refresh_s,
            poked=look,
        )
        return health, cache

    def _evidence_source(self) -> EvidenceSource:
        return EvidenceSource(
            driver_root=Path(self._fixed.driver.root),
            library_dirs=self._fixed.driver.library_dirs,
            stage_dir=Path(self._fixed.driver.stage_dir),
            compat_dir=self._fixed.compat.dir,
            look=self._source.kernel_view,
            answered=lambda: self._source.answered,
            scanned=lambda: self._driver.scanned,
        )

    def _follow(self) -> None:
        self.cache.subscribe(lambda _inventory, _began: self.inventory.answered())
        self.inventory.subscribe(self._driver.look_again)
        self._node_state.then(self._labels.again.set, Changed.NODE, Changed.POLICY)
        self._node_state.then(self._snapshots.changed.set, Changed.NODE)
        self._node_state.then(self.health.changed.set, Changed.POLICY, Changed.LEDGER)
        self._node_state.then(self.health.follow_ledger, Changed.LEDGER)
        self._node_state.first(self.mps.prepare, Changed.NODE, Changed.POLICY)
        self._node_state.then(self.mps.woken.set, Changed.POLICY)
        self._node_state.then(self.mps.follow_ledger, Changed.LEDGER)

    def restore(self) -> None:
        """Go by the last daemon's snapshot until the driver answers. A simulated node has none."""
        self._restored = not self._simulated and self._snapshots.restore(self.cache, self._recalled)
        if self._restored:
            self._labels.again.set()

    def _recalled(self, inventory: Inventory) -> Inventory:
        """Return the last inventory as NVML told it; which GPUs are out of use is known to the node state."""
        return self.health.recalled(marked(inventory, NO_CORDONS))

    async def known(self) -> None:
        """Wait until the node can grant, or why it cannot is known."""
        if not self._restored:
            await self.cache.ready()
            await self._driver.looked.wait()

    def runs(self) -> Iterator[Coroutine[None, None, None]]:
        """Yield the coroutines that run until they are cancelled."""
        yield from (self._driver.run(), self.cache.run(), self.health.run(), self._watch.run())
        yield from (self._snapshots.run(), self.mps.run(), self._labels.run(), self.usage.run())

    def look_again(self) -> None:
        """Ask the driver for its GPUs, and look for its files, now."""
        self.cache.poke()
        self._driver.look_again()

    def restarts(self) -> Mapping[str, int]:
        """Return how often each child was started after the first time."""
        starts = {"nvml": self._source.starts, "events": self.health.listeners}
        return {child: max(0, started - 1) for child, started in starts.items()}

    def close(self) -> None:
        """Release the stage folder, after all work has ended, and no thread is left."""
        self._driver.close()

    def _node_changed(self) -> None:
        """Look again: a device, a node, a module or an instance came or went, as seen without the driver."""
        self.cache.poke()
        self._driver.look_soon()

    def _module_changed(self) -> None:
        self.inventory.module_changed(self._node_state.node.module_version or "")
        self.cache.poke()

    def _generations(self) -> frozenset[str] | None:
        """Return the drivers whose files containers have mounted, or None until the runtime has listed containers."""
        ledger = self._node_state.synchronized_ledger
        return None if ledger is None else ledger.generations()
