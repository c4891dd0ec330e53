"""Keeps the node's labels in a file for Node Feature Discovery, off the hook's path."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nri_gpu.inventory.labels import file_text, labels, machine_name
from nri_gpu.log import logger
from nri_gpu.policy.kubelet import KubeletSettings
from nri_gpu.runtime.board import Board
from nri_gpu.verbs.told import work_when_told

RETRY_S: Final = 60.0
MODE: Final = 0o644  # Node Feature Discovery may not run as root


class LabelKeeper:
    """Writes the file when told that the GPUs, or the place of the file, may be others; whole or not at all."""

    def __init__(
        self,
        board: Board,
        file: Callable[[], str],
        kubelet: KubeletSettings,
        *,
        retry_s: float = RETRY_S,
        machine: str | None = None,
    ) -> None:
        """file: the policy's word of the moment; empty: none is wanted. kubelet: what it is offered in this process."""
        self._board = board
        self._file = file
        self._kubelet = kubelet
        self._retry_s = retry_s
        self._machine = machine
        self._again = asyncio.Event()
        self._written: tuple[Path, str] | None = None
        self._fault = ""

    def look_again(self) -> None:
        """GPUs or policy may be others now."""
        self._again.set()

    async def run(self) -> None:
        """Until cancelled."""
        await work_when_told(self._again, self.look, retry_s=self._retry_s)

    async def look(self) -> bool:
        """Write what is wanted, remove what is no more. Returns whether that went well."""
        file = Path(self._file()) if self._file() else None
        try:
            if self._written and self._written[0] != file:
                await asyncio.to_thread(self._written[0].unlink, missing_ok=True)
                self._written = None
            if file:
                await self._write(file)
        except OSError as error:
            if str(error) != self._fault:
                logger.bind(path=str(file), fault=str(error)).warning("node labels not written")
            self._fault = str(error)
            return False
        self._fault = ""
        return True

    async def _write(self, file: Path) -> None:
        inventory = self._board.snapshot().inventory
        # While a driver is replaced nothing is known for a moment; the labels, and what is placed by them, stay.
        if inventory.fault:
            return
        if self._machine is None:
            self._machine = machine_name()
        text = file_text(labels(inventory, self._machine, self._kubelet))
        if self._written == (file, text):
            return
        await asyncio.to_thread(write_whole, file, text)
        self._written = file, text
        logger.bind(path=str(file), gpus=len(inventory.gpus)).info("node labels written")


def write_whole(file: Path, text: str) -> None:
    """Never half a file. Raises: OSError: its folder is missing, too, for that is Node Feature Discovery's to make."""
    # Its name begins with a dot: Node Feature Discovery reads every other file of the folder.
    draft = file.with_name(f".{file.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        os.fchmod(descriptor, MODE)  # whatever the umask
        stream.write(text)
    draft.replace(file)
