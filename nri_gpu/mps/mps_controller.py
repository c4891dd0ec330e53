"""The controllers of MPS daemons: each GPU held in mode=mps has a daemon, without which containers must not start.

A GPU's daemon is up while containers use it, and ended when they are gone or others hold the GPU.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

from loguru import logger
from msgspec.structs import replace

from nri_gpu.decision.mps_seats import holds_by_mps, uses_mps
from nri_gpu.domain.decision import Grant
from nri_gpu.domain.errors import cause_of, fault_of
from nri_gpu.domain.gpu import GpuUuid
from nri_gpu.domain.gpu_request import Mode
from nri_gpu.domain.mps import MpsFolders
from nri_gpu.ledger.ledger import Ledger
from nri_gpu.mps.mps_daemon import MpsDaemon, MpsError, MpsTools
from nri_gpu.mps.mps_folders import DaemonFolder, clients, leftovers, mount_fault, noted_folders, remove
from nri_gpu.policy.mps_settings import MpsSettings
from nri_gpu.system.state import NodeState
from nri_gpu.system.tasks import Backoff, LogOnce, cancelled, first_done, set_within

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0  # a daemon that was up for so long is restarted without a pause
LOOK_S: Final = 5.0  # between two looks for a missing mount or folder
_FAULT_SHOWN_MAX: Final = 300  # characters


class Demand(StrEnum):
    """The ledger's demand for a GPU's daemon."""

    UP = "up"  # containers use it
    IDLE = "idle"  # nobody holds the GPU
    DOWN = "down"  # containers hold the GPU in another mode


class GpuMpsController:
    """A controller of one GPU's daemon.

    served: a container has started with it. renewed: see `MpsDaemon`.
    """

    def __init__(self, folder: DaemonFolder, node_state: NodeState, renewed: Callable[[], DaemonFolder]) -> None:
        self.demand = Demand.UP
        self.served = False
        self._daemon = MpsDaemon(folder, renewed)
        self._log = logger.bind(gpu_uuid=folder.uuid)
        self._faults = LogOnce()
        self._node_state = node_state
        self._woken = asyncio.Event()
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._retry_at = 0.0
        self._up_since = 0.0
        self._idle_since: float | None = None

    @property
    def up(self) -> bool:
        """Return whether the daemon serves: its process is checked now."""
        return self._daemon.alive

    @property
    def fault(self) -> str:
        """Return why it is not up, or empty."""
        return self._faults.fault

    @property
    def folder(self) -> str:
        """Return the daemon's folder, or the next daemon's while none is up."""
        return str(self._daemon.folder.folder)

    def wanted(self, demand: Demand) -> None:
        """Note that containers came or went.

        DOWN to IDLE is ignored: the kubelet makes a refused container anew, which raises a new demand.
        """
        if demand is not self.demand and (self.demand, demand) != (Demand.DOWN, Demand.IDLE):
            self.demand = demand
            self._woken.set()

    async def run(self) -> None:
        """Run until the daemon is gone for good. When nri-gpu ends, the daemon goes on."""
        adopted = False
        while True:
            if self.demand is not Demand.IDLE:
                self._idle_since = None
            if self._up_since and not self._daemon.alive:
                self._lost()
            try:
                if not adopted:
                    await self._adopt()
                    adopted = True
                if self._used():
                    await self._keep_up()
                elif self._over():
                    self._up_since = 0.0
                    await self._daemon.end(self._tools())
                    self._log.info("MPS daemon ended")
                    if not self._used():
                        return
                elif self.served:
                    await self._replace()
            except MpsError as error:
                self._failed(str(error))
            await first_done(self._woken.wait(), self._daemon.ended(), timeout_s=self._wait_s())
            self._woken.clear()

    def _used(self) -> bool:
        return self.demand is Demand.UP

    @property
    def _settings(self) -> MpsSettings:
        return self._node_state.settings.mps

    def _tools(self) -> MpsTools:
        """Return the driver's tools. Raises: MpsError: the driver is not staged."""
        return MpsTools.of(self._node_state.node.driver)

    def _over(self) -> bool:
        if self.demand is Demand.DOWN:
            return True
        now = time.monotonic()
        self._idle_since = now if self._idle_since is None else self._idle_since
        return now - self._idle_since >= self._settings.linger_s

    async def _adopt(self) -> None:
        if await self._daemon.adopt(self._tools(), self._settings):
            self.served = True  # it may have been
            self._started("MPS daemon taken over")

    async def _keep_up(self) -> None:
        if self._daemon.alive:
            return
        self._daemon.prepare()
        if time.monotonic() >= self._retry_at:
            self.served = False
            await self._daemon.start(self._tools(), self._settings)
            self._started("MPS daemon started")

    async def _replace(self) -> None:
        """Give the next clients a new daemon with nothing of the earlier clients, which are all gone."""
        self._up_since = 0.0
        await self._daemon.quit(self._tools())
        self.served = False
        if not self._over():
            await self._keep_up()

    def _started(self, phrase: str) -> None:
        self._faults.clear()
        self._up_since = time.monotonic()
        self._log.info(phrase)

    def _lost(self) -> None:
        """Note that the daemon ended by itself, and took its clients' work on the GPU with it."""
        self._daemon.lost()
        self.served = False
        steady = time.monotonic() - self._up_since >= STEADY_S
        self._up_since = 0.0
        self._log.warning("MPS daemon ended by itself")
        if steady:
            self._pauses.reset()
        else:
            self._back_off()

    def _failed(self, sentence: str) -> None:
        self._faults.warning("MPS daemon not up", sentence, gpu_uuid=self._daemon.folder.uuid)
        self._back_off()

    def _back_off(self) -> None:
        self._retry_at = time.monotonic() + self._pauses.next_s()

    def _wait_s(self) -> float | None:
        """Return the seconds until there may be something to do, or None for no limit."""
        now = time.monotonic()
        if self.demand is Demand.UP:
            return None if self._daemon.alive else max(self._retry_at - now, 0.0)
        if self._retry_at > now:
            return self._retry_at - now
        since = now if self._idle_since is None else self._idle_since
        return max(since + self._settings.linger_s - now, 0.0) if self.demand is Demand.IDLE else 0.0


class MpsController:
    """A controller of the daemons of all GPUs.

    Before the runtime has listed its containers, no daemon is touched. The node state is told the folders for
    containers that are created from now on, and `prepare` makes them at once: a runtime refuses what it cannot mount in
    words of its own. woken: set when there may be something to do.
    """

    def __init__(self, state: Path, node_state: NodeState) -> None:
        """Read the noted daemons. state: the state folder."""
        self._state = state
        self._node_state = node_state
        self._controllers: dict[GpuUuid, GpuMpsController] = {}
        self._tasks: dict[asyncio.Task[None], GpuUuid] = {}
        self.woken = asyncio.Event()
        self._noted = noted_folders(state)
        named: dict[str, str] = {folder.uuid: folder.generation for folder in self._noted}
        self._folders = MpsFolders(str(clients(state)), _generation(), named, mount_fault(clients(state)))
        self._prepared: dict[GpuUuid, DaemonFolder] = {}
        self._complained = False
        self._tidied = False  # nothing was left to control or to remove at the last look
        node_state.put_mps(self._folders)

    def prepare(self) -> None:
        """Make the folders of each GPU's next daemon. Follows node and policy, so that no decision comes in between."""
        unmade: dict[str, str] = {}
        if self._folders.fault:
            self._prepared.clear()  # of a file system that has gone
        elif self._node_state.settings.mps.enabled:
            for gpu in self._node_state.node.inventory.gpus:
                folder = DaemonFolder(self._state, gpu.uuid, self._folders.generation(gpu.uuid))
                if self._prepared.get(gpu.uuid) != folder:
                    try:
                        folder.make()
                    except OSError as error:
                        unmade[gpu.uuid] = cause_of(error)
                    else:
                        self._prepared[gpu.uuid] = folder
        if unmade != self._folders.unmade:
            self._put(replace(self._folders, unmade=unmade))

    def follow_ledger(self) -> None:
        """Wake up at a change of the ledger if MPS is in use.

        The ledger changes several times for each container with a GPU, and most nodes have no MPS.
        """
        if self._node_state.settings.mps.enabled or not self._tidied or uses_mps(self._node_state.ledger):
            self.woken.set()

    def start_hindrance(self, grant: Grant) -> str:
        """Return why a container with this grant must not start yet, or empty. Costs at most a poll(2) a GPU."""
        for uuid in grant.held:
            controller = self._controllers.get(uuid)
            if holds_by_mps(grant):
                if controller is None or not controller.up:
                    why = f" ({controller.fault[:_FAULT_SHOWN_MAX]})" if controller and controller.fault else ""
                    return f"the MPS daemon of {uuid} is not up yet{why}: try again in a moment with a new container."
                if grant.seat is None or grant.seat.folder != controller.folder:
                    return (
                        f"the MPS daemon of {uuid} that this container was created for has ended, and a new daemon is "
                        "up: try again in a moment with a new container."
                    )
                controller.served = True
            elif controller is not None:
                controller.wanted(Demand.DOWN)  # a refused container may be gone before the ledger is looked at
                return (
                    f"the MPS daemon that earlier containers used on {uuid} is being ended, and until then no other "
                    "program can use that GPU: try again in a moment."
                )
        return ""

    async def run(self) -> None:
        """Run until cancelled. The daemons go on."""
        try:
            while True:
                enabled = self._node_state.settings.mps.enabled
                lacking = enabled and (self._folders.fault or self._folders.unmade)
                await set_within(self.woken, LOOK_S if lacking else None)
                self.woken.clear()
                self._look_for_mount()
                self.prepare()
                ledger = self._node_state.synchronized_ledger
                if ledger is None:
                    continue
                for folder in self._noted:
                    self._control(folder)
                self._noted = ()
                self._reconcile(ledger)
                removed = await self._tidy(ledger)
                self._tidied = removed and not self._controllers and not uses_mps(ledger)
        finally:
            await cancelled(self._tasks)

    def _look_for_mount(self) -> None:
        fault = mount_fault(clients(self._state))
        if fault != self._folders.fault and self._node_state.settings.mps.enabled:
            self._put(replace(self._folders, fault=fault))

    def _put(self, folders: MpsFolders) -> None:
        self._folders = folders
        self._node_state.put_mps(folders)

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
        self._controllers[uuid] = controller = GpuMpsController(folder, self._node_state, partial(self._renewed, uuid))
        task = asyncio.create_task(controller.run())
        self._tasks[task] = uuid
        task.add_done_callback(self._done)

    def _renewed(self, uuid: GpuUuid) -> DaemonFolder:
        """Note that a GPU's daemon has ended, and return the folder of its next one.

        From now on containers are created for that.
        """
        self._put(replace(self._folders, later={**self._folders.later, uuid: _generation()}))
        self.woken.set()  # the old one's folder may have to go
        return DaemonFolder(self._state, uuid, self._folders.generation(uuid))

    async def _tidy(self, ledger: Ledger) -> bool:
        """Remove the folders of ended daemons that no container has any more. Return whether none is left."""
        seats = (entry.grant.seat for entry in ledger.entries.values())
        kept = {seat.folder for seat in seats if seat}
        kept |= {controller.folder for controller in self._controllers.values()}
        kept |= {str(prepared.folder) for prepared in self._prepared.values()}
        removed = True
        # The list is complete before anything is awaited, so a folder made meanwhile is not in it.
        for path in leftovers(self._state, frozenset(kept)):
            try:
                await asyncio.to_thread(remove, path)
            except OSError as error:
                removed = False
                if not self._complained:  # once: the names differ each time
                    self._complained = True
                    logger.bind(path=str(path), fault=fault_of(error)).warning(
                        "folder of an ended MPS daemon not removed"
                    )
        return removed

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._controllers[self._tasks.pop(task)]
        if task.cancelled():
            return
        if error := task.exception():
            logger.opt(exception=error).error("bug: MPS daemon not controlled any more")
        self.woken.set()  # containers may have come meanwhile


def _generation() -> str:
    return secrets.token_hex(4)
