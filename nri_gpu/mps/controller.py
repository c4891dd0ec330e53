"""Keeps an MPS daemon for each GPU that is held in mode=mps, and tells which containers must not start yet."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.decision.mps import holds_by_mps
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.mps import MpsFolders
from nri_gpu.mps.folders import DaemonFolder, clients, leftovers, mount_fault, noted_folders, remove
from nri_gpu.mps.gpu_controller import Demand, GpuMpsController, MpsDependencies

_FAULT_SHOWN_MAX: Final = 300  # characters
MOUNT_S: Final = 5.0  # between two looks for a missing mount


class MpsController:
    """Controls the daemons of all GPUs.

    ledger: None before the runtime has listed its containers; until then no daemon is touched. publish: told the
    folders for containers that are created from now on.
    """

    def __init__(
        self,
        state: Path,
        ledger: Callable[[], Ledger | None],
        dependencies: MpsDependencies,
        publish: Callable[[MpsFolders], None],
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._dependencies = dependencies
        self._publish = publish
        self._controllers: dict[GpuUuid, GpuMpsController] = {}
        self._tasks: dict[asyncio.Task[None], GpuUuid] = {}
        self._woken = asyncio.Event()
        self._noted = noted_folders(state)
        named: dict[str, str] = {folder.uuid: folder.generation for folder in self._noted}
        self._folders = MpsFolders(str(clients(state)), _generation(), named, mount_fault(clients(state)))
        self._complained = False
        publish(self._folders)

    def look_again(self) -> None:
        """Grants or the policy changed."""
        self._woken.set()

    def start_hindrance(self, grant: Grant) -> str:
        """Why a container with this grant must not start yet; empty when it may. Costs at most a poll(2) a GPU."""
        for uuid in grant.uuids:
            controller = self._controllers.get(uuid)
            if holds_by_mps(grant):
                if controller is None or not controller.up:
                    return _not_up(uuid, controller.fault if controller else "")
                if grant.seat is None or grant.seat.folder != controller.folder:
                    return (
                        f"the MPS daemon of {uuid} that this container was created for has ended, and another one is "
                        "up: try again in a moment with a new container."
                    )
                controller.served = True
            elif controller is not None:
                return (
                    f"the MPS daemon that earlier containers used on {uuid} is being ended, and until then no other "
                    "program can use that GPU: try again in a moment."
                )
        return ""

    async def run(self) -> None:
        """Until cancelled. The daemons go on."""
        try:
            while True:
                await self._something()
                self._look_for_mount()
                ledger = self._ledger()
                if ledger is None:
                    continue
                for folder in self._noted:
                    self._control(folder)
                self._noted = ()
                self._reconcile(ledger)
                await self._tidy(ledger)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _something(self) -> None:
        missing = self._folders.fault and self._dependencies.settings().enabled
        with suppress(TimeoutError):
            async with asyncio.timeout(MOUNT_S if missing else None):
                await self._woken.wait()
        self._woken.clear()

    def _look_for_mount(self) -> None:
        if not self._dependencies.settings().enabled:
            return
        fault = mount_fault(clients(self._state))
        if fault != self._folders.fault:
            self._put(replace(self._folders, fault=fault))

    def _put(self, folders: MpsFolders) -> None:
        self._folders = folders
        self._publish(folders)

    def _reconcile(self, ledger: Ledger) -> None:
        usage = ledger.usage()
        for uuid in [uuid for uuid, use in usage.items() if use.mode is Mode.MPS]:
            self._control(DaemonFolder(self._state, uuid, self._folders.generation(uuid)))
        for uuid, controller in self._controllers.items():
            use = usage.get(uuid)
            controller.wanted(Demand.IDLE if use is None else Demand.UP if use.mode is Mode.MPS else Demand.DOWN)

    def _control(self, folder: DaemonFolder) -> None:
        uuid = folder.uuid
        if uuid in self._controllers:
            return
        self._controllers[uuid] = controller = GpuMpsController(
            folder, self._dependencies, partial(self._renewed, uuid)
        )
        task = asyncio.create_task(controller.run())
        self._tasks[task] = uuid
        task.add_done_callback(self._done)

    def _renewed(self, uuid: GpuUuid) -> DaemonFolder:
        """A GPU's daemon has ended: from now on containers are created for its next one."""
        self._put(replace(self._folders, later={**self._folders.later, uuid: _generation()}))
        self._woken.set()  # the old one's folder may have to go
        return DaemonFolder(self._state, uuid, self._folders.generation(uuid))

    async def _tidy(self, ledger: Ledger) -> None:
        """Remove the folders of ended daemons that no container has any more."""
        seats = (entry.grant.seat for entry in ledger.entries.values())
        kept = {seat.folder for seat in seats if seat} | {
            controller.folder for controller in self._controllers.values()
        }
        # The list is complete before anything is awaited, so a folder made meanwhile is not in it.
        for path in leftovers(self._state, frozenset(kept)):
            try:
                await asyncio.to_thread(remove, path)
            except OSError as error:
                if not self._complained:  # once: the names differ each time
                    self._complained = True
                    logger.bind(path=str(path), fault=str(error)).warning("folder of an ended MPS daemon not removed")

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._controllers[self._tasks.pop(task)]
        if task.cancelled():
            return
        if error := task.exception():
            logger.opt(exception=error).error("bug: MPS daemon not controlled any more")
        self._woken.set()  # containers may have come meanwhile


def _generation() -> str:
    return secrets.token_hex(4)


def _not_up(uuid: GpuUuid, fault: str) -> str:
    why = f" ({fault[:_FAULT_SHOWN_MAX]})" if fault else ""
    return f"the MPS daemon of {uuid} is not up yet{why}: try again in a moment with a new container."
