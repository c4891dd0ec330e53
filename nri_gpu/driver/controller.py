"""Keeps the driver's staged files and its kernel module's version in the node state, off the request path."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec import Struct

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.node import DriverFiles
from nri_gpu.driver.compat import CompatKeeper
from nri_gpu.driver.owner import NotReleasedError, StageOwner, StageTakenError
from nri_gpu.driver.scan import FoundDriver, scan
from nri_gpu.driver.stage import prune, stage
from nri_gpu.driver.watch import Signs, changed, module_version, signs, staged_signs
from nri_gpu.system.state import NodeState

LOOK_S: Final = 5.0  # between two looks, which cost a millisecond where nothing changed
RELEASE_LOOK_S: Final = 0.25  # the same while the daemon before this one ends


class DriverPlace(Struct, frozen=True, kw_only=True):
    """Where the driver is and its copies go.

    library_dirs: below the root, where policy names more. state_dir: the owner of stage_dir is known by it.
    simulated: no kernel module is looked for, and no files are needed. compat_dir: CUDA's compatibility packages;
    None: there are none to look after. retry_s: how long after a failure the same files are scanned again.
    """

    root: Path
    library_dirs: tuple[str, ...] = ()
    stage_dir: Path
    state_dir: Path
    simulated: bool
    retry_s: float
    module: Callable[[], str] = module_version
    compat_dir: Path | None = None


class Around(Struct, frozen=True):
    """What it needs of the daemon.

    held: the driver generations that containers have mounted, None before the runtime told of its containers.
    module_changed: told when the kernel module is another one than before.
    """

    held: Callable[[], frozenset[str] | None]
    module_changed: Callable[[], None]


class _Last(Struct):
    """What is known of the last scan. signs: taken before it, None before the first. found: None where it failed."""

    signs: Signs | None = None
    found: FoundDriver | None = None
    fault: str = ""
    at: float = 0.0
    staged: Signs | None = None  # of the staged files, when they were last seen whole
    kept: frozenset[str] = frozenset()  # generations that the last prune left
    waiting: str = ""  # the version whose kernel module is waited for
    not_released: bool = False  # the daemon before this one still has the stage folder


class DriverKeeper:
    """Looks every few seconds; scans and stages when asked, or when a look shows that the driver changed."""

    def __init__(
        self, place: DriverPlace, node_state: NodeState, around: Around, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place = place
        self._node_state = node_state
        self._around = around
        self._clock = clock
        self._last = _Last()
        self._again = asyncio.Event()
        self._asked = True
        self._owner = StageOwner(place.stage_dir, place.state_dir)
        self._compat = CompatKeeper(place.compat_dir, self._owner, node_state) if place.compat_dir else None

    def look_again(self) -> None:
        """Scan anew now, whatever a look would show."""
        self._asked = True
        self._again.set()

    @property
    def scanned(self) -> Signs | None:
        """The host's folders from before the scan whose files are on the node state; None where that cannot be said."""
        last, driver = self._last, self._node_state.node.driver
        return last.signs if last.found and driver and last.found.version == driver.version else None

    def look_soon(self) -> None:
        """Look now rather than in a few seconds; scan only where that shows a change."""
        self._again.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._again.clear()
            await self.look()
            with contextlib.suppress(TimeoutError):
                looks_s = RELEASE_LOOK_S if self._last.not_released else LOOK_S
                async with asyncio.timeout(min(looks_s, self._place.retry_s)):
                    await self._again.wait()

    async def look(self) -> None:
        """One look; a scan where it, or somebody, asks for one. Staging may copy for as long as the disk takes."""
        await self._look_at_module()
        asked, self._asked = self._asked, False
        if asked or await asyncio.to_thread(self._has_changed):
            await self._scan()
        if self._compat:
            await self._compat.look(asked=asked)
        if self._owner.held:
            await self._prune()

    def close(self) -> None:
        """Let the next daemon stage: called once no thread works for this one."""
        self._owner.close()

    async def _look_at_module(self) -> None:
        if self._place.simulated:
            return
        known = self._node_state.node.module_version
        version = await asyncio.to_thread(self._place.module)
        if version == (known or ""):
            return
        self._node_state.put_module(version)
        self._asked = True
        if known is not None:
            logger.bind(driver_version=version or "-").info("kernel module changed")
            self._around.module_changed()

    def _has_changed(self) -> bool:
        last, driver = self._last, self._node_state.node.driver
        if last.not_released or last.signs is None:
            return True
        if changed(self._place.root, self._place.library_dirs, last.signs, last.found):
            return True
        if driver is not None and last.staged is not None and staged_signs(driver) != last.staged:
            logger.bind(generation=driver.generation).warning("staged driver files were changed by others")
            return True
        return last.found is None and self._clock() - last.at >= self._place.retry_s

    async def _scan(self) -> None:
        last, place = self._last, self._place
        last.signs, last.found, last.at = (
            await asyncio.to_thread(signs, place.root, place.library_dirs),
            None,
            self._clock(),
        )
        try:
            last.found = await asyncio.to_thread(scan, place.root, library_dirs=place.library_dirs)
            if not self._waits(last.found.version):
                await self._stage(last.found)
        except DriverError as error:
            last.found, last.not_released = None, isinstance(error, NotReleasedError)
            # What the snapshot said is staged, the daemon before this one keeps for its containers.
            if not (last.not_released and self._node_state.node.driver):
                self._missing(error)
        else:
            last.fault, last.not_released = "", False

    async def _stage(self, found: FoundDriver) -> None:
        await asyncio.to_thread(self._owner.take)
        files = await asyncio.to_thread(stage, found, self._place.stage_dir)
        self._last.staged = await asyncio.to_thread(staged_signs, files)
        if files != self._node_state.node.driver:
            self._node_state.put_driver(files)
            _log_driver(found, files)

    def _waits(self, version: str) -> bool:
        """Whether these files have to wait for their kernel module.

        The staged files of the old driver are whole until then, and the module that is loaded understands them.
        """
        node, last = self._node_state.node, self._last
        kernel = node.module_version or node.inventory.driver_version
        waits = node.driver is not None and node.driver.version == kernel != version and not self._place.simulated
        if waits and last.waiting != version:
            logger.bind(driver_version=version).warning(
                "the new driver's kernel module is not loaded: containers get the old one's staged files until it is"
            )
        last.waiting = version if waits else ""
        return waits

    def _missing(self, error: DriverError) -> None:
        sentence, last, node = str(error), self._last, self._node_state.node
        if self._place.simulated and not isinstance(error, StageTakenError):
            files = DriverFiles(node.inventory.driver_version, "simulated", {}, {})
            if node.driver != files:
                self._node_state.put_driver(files)
            sentence = f"{sentence}; the node is simulated, so GPUs are granted without the driver's files"
        elif (node.driver, node.driver_fault) != (None, fault := f"{sentence}."):
            self._node_state.put_driver(None, fault)
        if sentence != last.fault:
            logger.bind(fault=sentence).warning("driver files not found")
        last.fault = sentence

    async def _prune(self) -> None:
        """Staged files of old drivers go once no grant names them; not before the runtime told us of all grants."""
        node, held = self._node_state.node, self._around.held()
        if held is None or node.driver is None:
            return
        keep = held | {node.driver.generation} | {package.generation for package in node.compat}
        if keep == self._last.kept:
            return
        try:
            removed = await asyncio.to_thread(prune, self._place.stage_dir, keep)
        except DriverError as error:
            logger.bind(fault=str(error)).warning("old driver files not removed")
        else:
            for generation in removed:
                logger.bind(generation=generation).info("old driver files removed")
        self._last.kept = keep


def _log_driver(found: FoundDriver, files: DriverFiles) -> None:
    bound = logger.bind(driver_version=files.version, generation=files.generation)
    bound.info("driver files staged")
    for capability, names in files.missing.items():
        if names:
            bound.bind(fault=f"{capability}: {', '.join(names)}").info("not part of this driver")
    if found.left_out:
        bound.bind(fault="; ".join(map(str, found.left_out[:20]))).warning("driver files left out")
    if found.unknown:
        bound.bind(fault=", ".join(found.unknown[:20])).info("driver files of no known capability, given to nobody")
