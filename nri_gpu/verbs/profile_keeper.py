"""Keeps application profiles written for the GPUs that are there, off the hook's path."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from nri_gpu.domain.errors import DriverError
from nri_gpu.domain.extras import Profiles
from nri_gpu.driver.profiles import planned_profiles, write_profiles
from nri_gpu.log import logger
from nri_gpu.runtime.board import Board
from nri_gpu.verbs.told import work_when_told

RETRY_S: Final = 60.0


class ProfileKeeper:
    """Writes them when told that the GPUs may be others, and puts on the board for which they are there."""

    def __init__(self, stage_dir: Path, board: Board, *, retry_s: float = RETRY_S) -> None:
        self._stage_dir = stage_dir
        self._board = board
        self._retry_s = retry_s
        self._again = asyncio.Event()

    def look_again(self) -> None:
        """The GPUs may be others now."""
        self._again.set()

    async def run(self) -> None:
        """Until cancelled."""
        await work_when_told(self._again, self.look, retry_s=self._retry_s)

    async def look(self) -> bool:
        """Write what is missing. Returns whether that went well."""
        node = self._board.snapshot()
        minors = frozenset(gpu.minor_number for gpu in node.gpus)
        # With none known (the driver is being replaced, say) those that are there stay good.
        if not minors or node.profiles == planned_profiles(self._stage_dir, minors):
            return True
        try:
            profiles = await asyncio.to_thread(write_profiles, self._stage_dir, minors)
        except DriverError as error:
            self._failed(str(error))
            return False
        self._board.put_profiles(profiles)
        logger.bind(gpus=len(minors), path=profiles.folder).debug("application profiles written")
        return True

    def _failed(self, sentence: str) -> None:
        known = self._board.snapshot().profiles
        if known is None or known.fault != sentence:
            self._board.put_profiles(Profiles(str(self._stage_dir), fault=sentence))
            logger.bind(fault=sentence).warning("application profiles not written")
