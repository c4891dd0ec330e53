"""Keeps `snapshot.json` as the board is, off the hook's path; at the start puts on the board what it still proves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Final

from msgspec import Struct

from nri_gpu import __version__
from nri_gpu.domain.gpu import DriverFiles, Inventory
from nri_gpu.driver.module import module_version, module_versions
from nri_gpu.driver.watch import signs, staged_evidence
from nri_gpu.files import boot_id
from nri_gpu.inventory.cache import InventoryCache
from nri_gpu.log import logger
from nri_gpu.runtime import snapshot
from nri_gpu.runtime.board import Board
from nri_gpu.runtime.snapshot import Evidence, Snapshot, SnapshotError
from nri_gpu.runtime.state import StateFolder

LOOK_S: Final = 1.0  # between two comparisons of a few values in memory


class Host(Struct, frozen=True, kw_only=True):
    """Where the evidence is gathered.

    look: a glance at what the kernel shows. answered: the glance from before the inventory that is on the board was
    asked for, None before the first answer: what changed since then must not count as seen.
    scanned: the driver's folders from before the scan whose files are on the board, None before the first.
    """

    driver_root: Path
    library_dirs: tuple[str, ...]
    stage_dir: Path
    look: Callable[[], Hashable]
    answered: Callable[[], Hashable]
    scanned: Callable[[], snapshot.Signs | None]
    module: Callable[[], str] = module_version
    modules: Callable[[], tuple[str, ...]] = module_versions
    boot_id: Callable[[], str] = boot_id

    @property
    def settings(self) -> tuple[str, ...]:
        """What a reload could have changed."""
        return (str(self.driver_root), str(self.stage_dir), *self.library_dirs)


class SnapshotKeeper:
    """Writes after each change, and reads once. A simulated node has none: its file is read in a millisecond."""

    def __init__(self, state: StateFolder, key: bytes, host: Host, board: Board) -> None:
        self._state = state
        self._key = key
        self._host = host
        self._board = board
        self._written: object = None
        self._fault = ""

    def restore(self, cache: InventoryCache) -> bool:
        """Go by the last snapshot until the driver answers. Returns whether there is one that holds."""
        last = self.recall()
        if last is None:
            return False
        cache.recall(last.inventory)
        self._board.put_module(last.evidence.module_version)
        self._board.put_driver(last.driver)
        self._board.put_inventory(last.inventory)
        bound = logger.bind(gpus=len(last.inventory.gpus), driver_version=last.driver.version)
        bound.bind(inventory_age_s=cache.age_s()).info("serving the last snapshot until the driver answers")
        return True

    def recall(self) -> Snapshot | None:
        """The last snapshot, where everything that can be seen without the driver is as it was."""
        try:
            last = snapshot.read(self._state.path, self._key)
        except SnapshotError as error:
            logger.bind(path=str(self._state.path / snapshot.FILE), fault=str(error)).warning("snapshot ignored")
            return None
        if last is None:
            return None
        if differences := last.evidence.differences(self._evidence_now(last)):
            logger.bind(fault=differences).info("the last snapshot does not hold any more")
            return None
        return last

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.keep()
            await asyncio.sleep(LOOK_S)

    async def keep(self) -> None:
        """Write it if something is another than what was written."""
        node, sight, scanned = self._board.snapshot(), self._host.answered(), self._host.scanned()
        if node.inventory.fault or node.driver is None or not node.module_version or sight is None or scanned is None:
            return  # the node cannot grant: there is nothing to get a head start with
        now = (node.inventory, node.driver, node.module_version, sight, scanned)
        if now == self._written:
            return
        try:
            await asyncio.to_thread(self._write, now)
        except OSError as error:
            if str(error) != self._fault:
                logger.bind(fault=str(error)).warning("snapshot not written; a restart will wait for the driver")
            self._fault = str(error)
        else:
            self._written, self._fault = now, ""

    def _write(self, now: tuple[Inventory, DriverFiles, str, Hashable, snapshot.Signs]) -> None:
        inventory, driver, version, sight, scanned = now
        evidence = Evidence(
            boot_id=self._host.boot_id(),
            program=__version__,
            module_version=version,
            settings=self._host.settings,
            host=scanned,
            staged=staged_evidence(driver),
            sight=snapshot.sight_of(sight),
            module_versions=self._host.modules(),
        )
        content = snapshot.to_bytes(Snapshot(evidence=evidence, inventory=inventory, driver=driver), self._key)
        self._state.write(snapshot.FILE, content)

    def _evidence_now(self, last: Snapshot) -> Evidence:
        version = self._host.module()
        # The libraries must be those of the module, whatever was written down: the two together are what works.
        return Evidence(
            boot_id=self._host.boot_id() or "unknown",
            program=__version__,
            module_version=version if version == last.driver.version == last.inventory.driver_version else "",
            settings=self._host.settings,
            host=signs(self._host.driver_root, self._host.library_dirs),
            staged=staged_evidence(last.driver),
            sight=snapshot.sight_of(self._host.look()),
            module_versions=self._host.modules(),
        )
