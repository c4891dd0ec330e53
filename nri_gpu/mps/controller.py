"""Keeps an MPS daemon for each GPU that is held in that mode, off the hook's path; says who must not start yet."""

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
from nri_gpu.mps.folders import DaemonFolder, clients, leftovers, mount_fault, noted_places, remove
from nri_gpu.mps.gpu_controller import Demand, GpuMpsController, MpsDependencies

_FAULT_SHOWN_MAX: Final = 300  # characters
MOUNT_S: Final = 5.0  # between two looks for a mount that is missing


class MpsController:
    """All GPUs' daemons. ledger: None before the runtime told who holds what; until then no daemon is touched.

    publish: told where containers that are created from now on find the daemons.
    """

    def __init__(
        self,
        state: Path,
        ledger: Callable[[], Ledger | None],
        around: MpsDependencies,
        publish: Callable[[MpsFolders], None],
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._around = around
        self._publish = publish
        self._tenders: dict[GpuUuid, GpuMpsController] = {}
        self._tasks: dict[asyncio.Task[None], GpuUuid] = {}
        self._again = asyncio.Event()
        self._noted = noted_places(state)
        named: dict[str, str] = {place.uuid: place.generation for place in self._noted}
        self._folders = MpsFolders(str(clients(state)), _generation(), named, mount_fault(clients(state)))
        self._complained = False
        publish(self._folders)

    def look_again(self) -> None:
        """Grants, or the policy, may be others now."""
        self._again.set()

    def start_hindrance(self, grant: Grant) -> str:
        """Why a container with this grant must not start yet; empty when it may. In memory, but for one poll(2)."""
        for uuid in grant.uuids:
            tender = self._tenders.get(uuid)
            if holds_by_mps(grant):
                if tender is None or not tender.up:
                    return _not_up(uuid, tender.fault if tender else "")
                if grant.seat is None or grant.seat.folder != tender.folder:
                    return (
                        f"the MPS daemon of {uuid} that this container was created for has ended, and another one is "
                        "up: try again in a moment; the container is made anew then."
                    )
                tender.served = True
            elif tender is not None:
                return (
                    f"the MPS daemon that the last containers of {uuid} used is being ended, and until then no other "
                    "program can use that GPU: try again in a moment."
                )
        return ""

    async def run(self) -> None:
        """Until cancelled. The daemons stay."""
        try:
            while True:
                await self._something()
                self._look_for_mount()
                ledger = self._ledger()
                if ledger is None:
                    continue
                for place in self._noted:
                    self._tend(place)
                self._noted = ()
                self._reconcile(ledger)
                await self._tidy(ledger)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _something(self) -> None:
        missing = self._folders.fault and self._around.settings().enabled
        with suppress(TimeoutError):
            async with asyncio.timeout(MOUNT_S if missing else None):
                await self._again.wait()
        self._again.clear()

    def _look_for_mount(self) -> None:
        if not self._around.settings().enabled:
            return
        fault = mount_fault(clients(self._state))
        if fault != self._folders.fault:
            self._show(replace(self._folders, fault=fault))

    def _show(self, folders: MpsFolders) -> None:
        self._folders = folders
        self._publish(folders)

    def _reconcile(self, ledger: Ledger) -> None:
        usage = ledger.usage()
        for uuid in [uuid for uuid, use in usage.items() if use.mode is Mode.MPS]:
            self._tend(DaemonFolder(self._state, uuid, self._folders.generation(uuid)))
        for uuid, tender in self._tenders.items():
            use = usage.get(uuid)
            tender.wanted(Demand.IDLE if use is None else Demand.UP if use.mode is Mode.MPS else Demand.DOWN)

    def _tend(self, place: DaemonFolder) -> None:
        uuid = place.uuid
        if uuid in self._tenders:
            return
        self._tenders[uuid] = tender = GpuMpsController(place, self._around, partial(self._renewed, uuid))
        task = asyncio.create_task(tender.run())
        self._tasks[task] = uuid
        task.add_done_callback(self._done)

    def _renewed(self, uuid: GpuUuid) -> DaemonFolder:
        """That GPU's daemon has ended: containers are created for its next one from now on."""
        self._show(replace(self._folders, later={**self._folders.later, uuid: _generation()}))
        self._again.set()  # the old one's folder may have to go
        return DaemonFolder(self._state, uuid, self._folders.generation(uuid))

    async def _tidy(self, ledger: Ledger) -> None:
        """Remove the folders of daemons that have ended, once no container has them any more."""
        seats = (entry.grant.seat for entry in ledger.entries.values())
        kept = {seat.folder for seat in seats if seat} | {tender.folder for tender in self._tenders.values()}
        # Which ones is settled before anything is awaited: a folder that is made meanwhile is not among them.
        for path in leftovers(self._state, frozenset(kept)):
            try:
                await asyncio.to_thread(remove, path)
            except OSError as error:
                if not self._complained:  # of each look it would be too much: every one has other names
                    self._complained = True
                    logger.bind(path=str(path), fault=str(error)).warning("what clients of MPS left is not removed")

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tenders[self._tasks.pop(task)]
        if task.cancelled():
            return
        if error := task.exception():
            logger.opt(exception=error).error("MPS daemon not looked after")
        self._again.set()  # somebody may have come meanwhile


def _generation() -> str:
    return secrets.token_hex(4)


def _not_up(uuid: GpuUuid, fault: str) -> str:
    why = f" ({fault[:_FAULT_SHOWN_MAX]})" if fault else ""
    return f"the MPS daemon of {uuid} is not up yet{why}: try again in a moment; the container is made anew then."
