"""The upkeep of the driver's staged files and of its kernel module's version, off the request path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.gpu import DEFAULT_CAPABILITIES
from nri_gpu.domain.node import DriverFiles
from nri_gpu.driver.compat_packages import SHOWN, CompatController
from nri_gpu.driver.driver_scan import FoundDriver, Signatures, changed, folder_signatures, scan
from nri_gpu.driver.manifest import staged_driver, why_unfit
from nri_gpu.driver.stage import prune, stage, staged_signatures
from nri_gpu.driver.stage_owner import NotReleasedError, StageOwner, StageTakenError
from nri_gpu.driver.trees import planned
from nri_gpu.host.modules import module_version
from nri_gpu.policy.model import Policy
from nri_gpu.system.state import NodeState
from nri_gpu.system.tasks import LogOnce, set_within

LOOK_S: Final = 5.0  # between two looks, which take a millisecond where nothing changed
RELEASE_LOOK_S: Final = 0.25  # while the daemon before this one ends


class _Scan(Struct, frozen=True):
    """The last scan."""

    signatures: Signatures | None = None  # taken before it, or None if there was none
    found: FoundDriver | None = None  # None if it failed
    at: float = 0.0


class DriverController:
    """The checks every few seconds; it scans and stages when asked to, or when the driver changed."""

    def __init__(
        self,
        policy: Policy,  # of the start
        state_dir: Path,  # identifies the owner of the stage folder
        node_state: NodeState,
        *,
        simulated: bool,  # there is no kernel module, and no files are needed
        stages: bool = True,  # whether there is a runtime whose containers get files
        held: Callable[[], frozenset[str] | None],  # generations that containers have mounted; None before Synchronize
        module_changed: Callable[[], None],  # called when another kernel module is loaded
        module: Callable[[], str] = module_version,  # the version of the loaded kernel module
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = Path(policy.driver.root)
        self._library_dirs = policy.driver.library_dirs
        self._stage_dir = Path(policy.driver.stage_dir)
        self._retry_s = policy.inventory.refresh_s  # after a failure the same files are scanned again
        self._simulated = simulated
        self._stages = stages
        self._module = module
        self._node_state = node_state
        self._held = held
        self._module_changed = module_changed
        self._clock = clock
        self._last = _Scan()
        self._staged: Signatures | None = None  # of the staged files, when they were last complete
        self._kept: frozenset[str] = frozenset()  # generations that the last prune left
        self._not_released = False  # the daemon before this one still owns the stage folder
        self._log = LogOnce()
        self._unfit = LogOnce()  # what was found, while staged files that fit the module serve
        self._again = asyncio.Event()
        self.looked = asyncio.Event()  # set once the files were staged, or could not be
        self._asked = True
        self._owner = StageOwner(self._stage_dir, state_dir)
        packages = policy.compat.dir if stages else ""
        self._compat = CompatController(Path(packages), self._owner, node_state) if packages else None

    def look_again(self) -> None:
        """Scan now, even if nothing changed."""
        self._asked = True
        self._again.set()

    @property
    def scanned(self) -> Signatures | None:
        """Return the host's folders from before the scan whose files are published, or None without such a scan."""
        found, driver = self._last.found, self._node_state.node.driver
        return self._last.signatures if found and driver and found.version == driver.version else None

    def look_soon(self) -> None:
        """Look now; scan only if something changed."""
        self._again.set()

    async def run(self) -> None:
        while True:
            self._again.clear()
            await self.look()
            self.looked.set()
            looks_s = RELEASE_LOOK_S if self._not_released else LOOK_S
            await set_within(self._again, min(looks_s, self._retry_s))

    async def look(self) -> None:
        """Look once, and scan if needed. Staging may copy for as long as the disk takes."""
        if not self._stages:
            self._put_simulated()
            return
        await self._look_at_module()
        asked, self._asked = self._asked, False
        if self._compat:  # before the driver, with which the first container is granted
            await self._compat.look(asked=asked)
        if asked or await asyncio.to_thread(self._has_changed):
            await self._scan()
        if self._owner.held:
            await self._prune()

    def close(self) -> None:
        """Let the next daemon stage: called once no thread works for this one."""
        self._owner.close()

    async def _look_at_module(self) -> None:
        if self._simulated:
            return
        known = self._node_state.node.module_version
        version = await asyncio.to_thread(self._module)
        if version == (known or ""):
            return
        self._node_state.put_module(version)
        self._asked = True
        if known is not None:
            logger.bind(driver_version=version or "-").info("kernel module changed")
            self._module_changed()

    def _has_changed(self) -> bool:
        last, driver = self._last, self._node_state.node.driver
        if self._not_released or last.signatures is None:
            return True
        if changed(self._root, self._library_dirs, last.signatures, last.found):
            return True
        if driver is not None and self._staged is not None and staged_signatures(driver) != self._staged:
            logger.bind(generation=driver.generation).warning("staged driver files were changed outside nri-gpu")
            return True
        return last.found is None and self._clock() - last.at >= self._retry_s

    async def _scan(self) -> None:
        before = await asyncio.to_thread(folder_signatures, self._root, self._library_dirs)
        self._last = _Scan(before, None, self._clock())
        try:
            found = await self._serve()
        except DriverError as error:
            self._not_released = isinstance(error, NotReleasedError)
            # If the recalled driver is staged, the daemon before this one keeps it for its containers.
            if not (self._not_released and self._node_state.node.driver):
                self._failed(error)
        else:
            self._last = _Scan(before, found, self._last.at)
            self._log.clear()
            self._not_released = False

    async def _serve(self) -> FoundDriver | None:
        """Stage the host's files, unless complete staged files of the loaded module's version serve better.

        A package manager takes many seconds to replace a driver, and the module stays until it is loaded again. Return
        the files that were found, or None if they are no driver. Raises: DriverError.
        """
        staged = await self._staged_for_module()
        found = None
        try:
            module = self._node_state.node.module_version or ""
            found = await asyncio.to_thread(scan, self._root, library_dirs=self._library_dirs, module=module)
            unfit = why_unfit(planned(found, self._stage_dir), staged) if staged else ""
            if not unfit:
                await self._stage(found)
        except DriverError as error:
            if staged is None:
                raise
            unfit = str(error)
        if staged and unfit:
            await self._put(staged)
        self._unfit.note("driver files do not fit the kernel module: containers get the staged ones that do", unfit)
        return found

    async def _staged_for_module(self) -> DriverFiles | None:
        """Return the complete staged files of the loaded module's version, or None.

        Raises: DriverError: the stage folder is another daemon's, or cannot be used.
        """
        node, version = self._node_state.node, self._kernel
        if self._simulated or not version or not await asyncio.to_thread(self._stage_dir.is_dir):
            return None
        await asyncio.to_thread(self._owner.take)
        return await asyncio.to_thread(staged_driver, self._stage_dir, version, node.generation)

    @property
    def _kernel(self) -> str:
        """Return the version of the kernel module, or empty if it is not known."""
        node = self._node_state.node
        return node.module_version or node.inventory.driver_version

    async def _stage(self, found: FoundDriver) -> None:
        await asyncio.to_thread(self._owner.take)
        files = await asyncio.to_thread(stage, found, self._stage_dir)
        if await self._put(files):
            _log_driver(found, files)

    async def _put(self, files: DriverFiles) -> bool:
        """Give containers these staged files. Return whether they got others before."""
        self._staged = await asyncio.to_thread(staged_signatures, files)
        if files == self._node_state.node.driver:
            return False
        self._node_state.put_driver(files)
        return True

    def _failed(self, error: DriverError) -> None:
        sentence, node = str(error), self._node_state.node
        if self._simulated and not isinstance(error, StageTakenError):
            self._put_simulated()
            sentence = f"{sentence}; the node is simulated, so GPUs are granted without the driver's files"
            self._log.note("driver files not found", sentence)
            return
        if (node.driver, node.driver_fault) != (None, fault := f"{sentence}."):
            self._node_state.put_driver(None, fault)
        self._log.warning("driver files not found", sentence)

    def _put_simulated(self) -> None:
        """Have GPUs granted without the driver's files."""
        node = self._node_state.node
        files = DriverFiles(node.inventory.driver_version, "simulated", {}, {})
        if node.driver != files:
            self._node_state.put_driver(files)

    async def _prune(self) -> None:
        """Remove old staged files once no grant names them, but not before the runtime has listed its containers.

        While files and kernel module are of two versions, none is removed: the module may need it.
        """
        node, held = self._node_state.node, self._held()
        if held is None or node.driver is None or not (self._simulated or node.driver.version == self._kernel):
            return
        keep = held | {node.driver.generation} | {package.generation for package in node.compat}
        if keep == self._kept:
            return
        try:
            removed = await asyncio.to_thread(prune, self._stage_dir, lambda folder: folder.name not in keep)
        except DriverError as error:
            logger.bind(fault=str(error)).warning("old driver files not removed")
        else:
            for generation in removed:
                logger.bind(generation=generation).info("old driver files removed")
        self._kept = keep


def _log_driver(found: FoundDriver, files: DriverFiles) -> None:
    bound = logger.bind(driver_version=files.version, generation=files.generation)
    bound.info("driver files staged")
    lacking = [f"{libraries} for {each}" for each, libraries in files.lacks.items() if each in DEFAULT_CAPABILITIES]
    if lacking:
        bound.bind(fault=", ".join(lacking)).warning("driver lacks a library that containers need")
    for capability, names in files.missing.items():
        if names:
            bound.bind(fault=f"{capability}: {', '.join(names)}").info("driver libraries not found")
    if found.left_out:
        bound.bind(fault="; ".join(map(str, found.left_out[:SHOWN]))).warning("driver files left out")
    if found.unknown:
        bound.bind(fault=", ".join(found.unknown[:SHOWN])).info("driver files of no known capability, not used")
