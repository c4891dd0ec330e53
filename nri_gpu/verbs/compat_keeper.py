"""Keeps the staged compatibility packages of CUDA on the board; off the hook's path, with the driver's looks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from nri_gpu.domain.compat import CompatPackage
from nri_gpu.domain.errors import DriverError
from nri_gpu.driver.compat import FoundCompat, FoundPackages, scan_compat, signs
from nri_gpu.driver.owner import StageOwner
from nri_gpu.driver.stage import stage_plan
from nri_gpu.log import logger
from nri_gpu.runtime.board import Board

SHOWN: Final = 20  # left-out files in a line of the log


class CompatKeeper:
    """Scans the folder of packages when it is asked to, or when a look shows that something in it changed."""

    def __init__(self, folder: Path, owner: StageOwner, board: Board) -> None:
        self._folder = folder
        self._owner = owner
        self._board = board
        self._signs: object = None
        self._said = ""

    async def look(self, *, asked: bool) -> None:
        """One look. asked: scan whatever it shows."""
        seen = await asyncio.to_thread(signs, self._folder)
        if not asked and seen == self._signs:
            return
        found, packages, faults = await asyncio.to_thread(self._take)
        self._signs = None if faults else seen  # what failed is tried again with the next look
        if packages != self._board.snapshot().compat:
            self._board.put_compat(packages)
            versions = ", ".join(f"{each.cuda_version} ({each.version})" for each in packages)
            logger.bind(name=versions or "-").info("CUDA compatibility packages staged")
        said = "; ".join((*faults, *map(str, found.left_out[:SHOWN])))
        if said and said != self._said:
            logger.bind(path=str(self._folder), fault=said).warning("CUDA compatibility packages left out")
        self._said = said

    def _take(self) -> tuple[FoundPackages, tuple[CompatPackage, ...], list[str]]:
        """What is there, what of it is staged now, and why other packages are not."""
        try:
            found = scan_compat(self._folder)
        except DriverError as error:
            return FoundPackages(), (), [str(error)]
        packages, faults = [], []
        for each in found.packages:
            try:
                packages.append(self._staged(each))
            except (DriverError, OSError) as error:
                faults.append(f"{each.generation} cannot be staged: {error}")
        return found, tuple(packages), faults

    def _staged(self, found: FoundCompat) -> CompatPackage:
        self._owner.take()
        return found.at(stage_plan(found.files, found.generation, self._owner.base))
