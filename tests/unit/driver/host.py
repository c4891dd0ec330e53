"""A host whose driver and kernel module change, and the controller that follows them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from nri_gpu.domain.node import DriverFiles, Inventory, Node
from nri_gpu.driver.driver_controller import DriverController
from nri_gpu.policy.model import CompatSettings, DriverSettings, Policy
from nri_gpu.system.state import NodeState
from tests.support.driver_root import make_driver_root

OLD, NEW = "570.26", "580.95.05"


class DriverHost:
    """A host with a driver, and who looks after it. module: what the kernel says; held: what the runtime does.

    packages: the folder of CUDA's compatibility packages.
    """

    def __init__(
        self,
        base: Path,
        *,
        simulated: bool = False,
        stage_dir: Path | None = None,
        packages: str = "",
        installs: str = OLD,
    ) -> None:
        self.base, self.root, self.stage_dir = base, base / "root", stage_dir or base / "stage"
        driver = DriverSettings(root=str(self.root), stage_dir=str(self.stage_dir))
        for version in (OLD, NEW):
            if not (base / version).exists():
                make_driver_root(base / version, version)
        if installs:
            self.install(installs)
        self.module = OLD
        self.held: frozenset[str] | None = frozenset()
        self.module_changes = 0
        self.now = 0.0
        self.node_state = NodeState(Inventory(taken_at=1, driver_version="" if simulated else OLD), "looking")
        self.controller = DriverController(
            Policy(driver=driver, compat=CompatSettings(dir=packages)),
            base / "state",
            self.node_state,
            simulated=simulated,
            held=lambda: self.held,
            module_changed=self._module_changed,
            module=lambda: self.module,
            clock=lambda: self.now,
        )

    def restarted(self) -> DriverHost:
        """The next daemon on the host as it is, after this one ended."""
        self.controller.close()
        after = DriverHost(self.base, stage_dir=self.stage_dir, installs="")
        after.module, after.held = self.module, self.held
        after.node_state.put_inventory(Inventory(taken_at=0, fault="starting"))
        return after

    def another(self, base: Path, *, simulated: bool = False) -> DriverHost:
        """Another daemon on the same stage folder. base: the same is that of the same state folder."""
        return DriverHost(base, simulated=simulated, stage_dir=self.stage_dir)

    def install(self, version: str) -> None:
        fresh = self.root.with_name("fresh")
        fresh.symlink_to(version)
        fresh.rename(self.root)

    def look(self) -> Node:
        asyncio.run(self.controller.look())
        return self.node_state.node

    def driver(self) -> DriverFiles:
        driver = self.look().driver
        assert driver is not None
        return driver

    def staged(self) -> set[str]:
        return {path.name for path in self.stage_dir.iterdir() if not path.name.startswith(".")}

    def _module_changed(self) -> None:
        self.module_changes += 1
