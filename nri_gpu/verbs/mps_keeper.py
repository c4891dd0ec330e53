"""Keeps an MPS daemon for each GPU that is held in that mode, off the hook's path; says who must not start yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from nri_gpu.allocation.ledger import Ledger
from nri_gpu.allocation.mps import holds_by_mps
from nri_gpu.domain.claim import Mode
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.log import logger
from nri_gpu.mps.place import Place, noted_places
from nri_gpu.mps.tender import Around, Tender, Wish

_FAULT_SHOWN_MAX: Final = 300  # characters


class MpsKeeper:
    """All GPUs' daemons. ledger: None before the runtime told who holds what; until then no daemon is touched."""

    def __init__(self, state: Path, ledger: Callable[[], Ledger | None], around: Around) -> None:
        self._state = state
        self._ledger = ledger
        self._around = around
        self._tenders: dict[GpuUuid, Tender] = {}
        self._tasks: dict[asyncio.Task[None], GpuUuid] = {}
        self._again = asyncio.Event()

    def look_again(self) -> None:
        """Grants may be others now."""
        self._again.set()

    def start_hindrance(self, grant: Grant) -> str:
        """Why a container with this grant must not start yet; empty when it may. In memory, but for one poll(2)."""
        for uuid in grant.uuids:
            tender = self._tenders.get(uuid)
            if holds_by_mps(grant):
                if tender is None or not tender.up:
                    return _not_up(uuid, tender.fault if tender else "")
            elif tender is not None:
                return (
                    f"the MPS daemon that the last containers of {uuid} used is being ended, and until then no other "
                    "program can use that GPU: try again in a moment."
                )
        return ""

    async def run(self) -> None:
        """Until cancelled. The daemons stay."""
        known = False
        try:
            while True:
                await self._again.wait()
                self._again.clear()
                ledger = self._ledger()
                if ledger is None:
                    continue
                if not known:
                    known = True
                    for place in await asyncio.to_thread(noted_places, self._state):
                        self._tend(place.uuid)
                self._reconcile(ledger)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reconcile(self, ledger: Ledger) -> None:
        usage = ledger.usage()
        for uuid in [uuid for uuid, use in usage.items() if use.mode is Mode.MPS]:
            self._tend(uuid)
        for uuid, tender in self._tenders.items():
            use = usage.get(uuid)
            tender.wanted(Wish.IDLE if use is None else Wish.UP if use.mode is Mode.MPS else Wish.DOWN)

    def _tend(self, uuid: GpuUuid) -> None:
        if uuid in self._tenders:
            return
        self._tenders[uuid] = tender = Tender(Place(self._state, uuid), self._around)
        task = asyncio.create_task(tender.run())
        self._tasks[task] = uuid
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tenders[self._tasks.pop(task)]
        if task.cancelled():
            return
        if error := task.exception():
            logger.opt(exception=error).error("MPS daemon not looked after")
        self._again.set()  # somebody may have come meanwhile


def _not_up(uuid: GpuUuid, fault: str) -> str:
    why = f" ({fault[:_FAULT_SHOWN_MAX]})" if fault else ""
    return f"the MPS daemon of {uuid} is not up yet{why}: try again in a moment; the container is made anew then."
