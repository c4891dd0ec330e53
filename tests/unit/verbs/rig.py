"""The daemon's parts around a machine that is made up at its edges alone: NVML's library, /proc, /sys and the runtime.

While anything is done to the machine, a client goes on creating containers for GPU 0, and a trace tells whether one of
them was answered while NVML was being asked. Time is counted in turns of the loop: a create has none to wait in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.allocation.ledger import Ledger
from nri_gpu.domain.gpu import Inventory
from nri_gpu.inventory.cache import InventoryCache
from nri_gpu.inventory.child import Deadlines
from nri_gpu.inventory.source import NvmlSource, Source
from nri_gpu.nri.subscribe import Event
from nri_gpu.policy.model import Policy
from nri_gpu.runtime.board import Board
from nri_gpu.runtime.plugin import Outside, Plugin
from nri_gpu.runtime.state import StateFolder
from nri_gpu.verbs.driver_keeper import Around, DriverKeeper, DriverPlace
from nri_gpu.verbs.node_watch import NodeWatch, Pace
from nri_gpu.verbs.snapshot_keeper import Host, SnapshotKeeper
from nri_gpu.wire import Status
from tests.support import nri_messages as nri
from tests.support.driver_root import make_driver_root
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure
from tests.support.scripted_runtime import until

DRIVER: Final = "580.95.05"
MAJORS: Final = "Character devices:\n195 nvidia\n195 nvidiactl\n508 nvidia-uvm\n510 nvidia-caps\n"
NO_MAJORS: Final = "Character devices:\n  1 mem\n"
# A hang is noticed soon; what is slow on a busy machine is not taken for one.
QUICK: Final = Deadlines(call_s=1.0, slow_call_s=3.0, refresh_s=20.0, end_s=1.0)
KEY: Final = bytes(32)


def gpus(count: int) -> list[FakeGpu]:
    return [FakeGpu(minor=at, uuid=f"GPU-{at:x}fa01700-0000-4000-8000-000000000000") for at in range(count)]


class Watched(NvmlSource):
    """The source, which tells when it asks."""

    def __init__(self, trace: list[str], base: Path) -> None:
        proc = base / "proc"
        super().__init__(
            base / "root", proc_devices=str(proc / "devices"), proc=proc, sysfs=str(base / "sys"), deadlines=QUICK
        )
        self._trace = trace
        self.asked = 0

    async def refresh(self) -> Inventory:
        self._trace.append("ask")
        try:
            return await super().refresh()
        finally:
            self.asked += 1
            self._trace.append("answer")

    @property
    def child(self) -> int | None:
        """Pid of the NVML process."""
        return self._child.pid


class Rig:
    """A machine, and the daemon's parts on it."""

    def __init__(self, base: Path, machine: Sequence[FakeGpu] | None) -> None:
        """machine: None for the one that is there already, after a restart of the daemon."""
        self.base, self.root = base, base / "root"
        self.module = self._loaded(DRIVER)
        if machine is not None:
            make_driver_root(self.root, DRIVER)
            build_fake_nvml(self.root, machine, driver=DRIVER)
        self.trace: list[str] = []
        self.faults: list[str] = []
        self.source = Watched(self.trace, base)
        self.board = Board(Inventory(taken_at=0, fault="starting"), "looking")
        self.cache = InventoryCache(self._judged(self.source), self._published, self.faults.append, refresh_s=3600)
        self._later: list[Callable[[], None]] = []
        outside = Outside(self.board.snapshot, time.monotonic, self._later.append, self._ledger_changed)
        self.plugin = Plugin(outside, Policy.default(), KEY)
        place = DriverPlace(
            root=self.root, stage_dir=base / "stage", simulated=False, retry_s=0.2, module=lambda: self.module
        )
        self.driver = DriverKeeper(place, self.board, Around(lambda: None, self.cache.poke))
        pace = Pace(look_s=0.02, quiet_s=0.0)
        self.watch = NodeWatch(self.source.glance, self._changed, folders=(), uevents=False, pace=pace)
        self.state = StateFolder(base / "state")
        self.state.path.mkdir(exist_ok=True)
        host = Host(
            driver_root=self.root,
            library_dirs=(),
            stage_dir=base / "stage",
            look=self.source.glance,
            answered=lambda: self.source.answered,
            scanned=lambda: self.driver.scanned,
            module=lambda: self.module,
        )
        self.snapshots = SnapshotKeeper(self.state, KEY, host, self.board)
        self.refused: list[str] = []
        self.created = 0

    # --- what happens to the machine ---

    def play(self, machine: Sequence[FakeGpu], *faults: Act, driver: str = DRIVER) -> None:
        """NVML says this from now on; the daemon is not told."""
        configure(self.root, machine, faults, driver=driver)

    def unload(self) -> None:
        """`rmmod nvidia`."""
        self.module = ""
        (self.base / "proc/devices").write_text(NO_MAJORS)
        (self.base / "sys/module/nvidia/version").unlink()
        (self.base / "sys/module/nvidia").rmdir()

    def load(self, version: str = DRIVER) -> None:
        """`modprobe nvidia`."""
        self.module = self._loaded(version)

    def capabilities(self, *minors: tuple[str, int]) -> None:
        """MIG instances of GPU 1 as the driver's own files have them."""
        for name, minor in minors:
            file = self.base / "proc/driver/nvidia/capabilities/gpu1/mig" / name / "access"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")

    def _loaded(self, version: str) -> str:
        for folder in ("proc", "sys/module/nvidia"):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        (self.base / "proc/devices").write_text(MAJORS)
        (self.base / "sys/module/nvidia/version").write_text(f"{version}\n")
        return version

    # --- what the daemon does ---

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the end, with a client that creates all the while."""
        parts = (self.cache.run(), self.driver.run(), self.watch.run(), *self._more())
        tasks = [asyncio.create_task(each) for each in parts]
        await self.until("the first grant", lambda: self.ask("device=0") == "")
        tasks.append(asyncio.create_task(self._create_for_ever()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended

    async def refreshed(self) -> None:
        """After one more answer to a question asked from now on."""
        asked = self.source.asked
        self.cache.poke()
        await self.until("a refresh", lambda: self.source.asked > asked and self.trace[-1] != "ask")
        if self.trace[-1] == "ask":
            await self.until("it to end", lambda: self.trace[-1] == "answer")

    async def until(self, what: str, fact: Callable[[], object]) -> None:
        await until(what, fact, 20.0)

    def ask(self, claim: str) -> str:
        """What a container that asks is told, empty for yes. It is gone at once."""
        of = nri.asking(claim, "probe")
        made = nri.container(of)
        reply = self.plugin.create_container(nri.create(of, made))
        self._settle()
        if isinstance(reply, Status):
            return reply.message
        assert pb.CreateContainerResponse.FromString(reply).adjust.linux.devices
        self.plugin.lifecycle(Event.REMOVE_CONTAINER, nri.event(Event.REMOVE_CONTAINER, of, made, own_rpc=True)[1])
        self._settle()
        return ""

    def answered_while_asking(self) -> int:
        """In how many of NVML's answers a container did not have to wait for it."""
        inside, found, created = False, 0, False
        for word in self.trace:
            if word == "ask":
                inside, created = True, False
            elif word == "answer":
                found += inside and created
                inside = False
            else:
                created = True
        return found

    def _settle(self) -> None:
        while self._later:
            self._later.pop(0)()

    async def _create_for_ever(self) -> None:
        while True:
            if refusal := self.ask("device=0"):
                self.refused.append(refusal)
            else:
                self.created += 1
                self._noted()
            await asyncio.sleep(0.002)

    def _noted(self) -> None:
        if self.trace and self.trace[-1] != "create":
            self.trace.append("create")

    # --- for a rig of more parts ---

    def _judged(self, source: Source) -> Source:
        """What the cache asks."""
        return source

    def _ledger_changed(self, ledger: Ledger) -> None:
        """Somebody holds something else."""

    def _more(self) -> Sequence[Coroutine[None, None, None]]:
        """What runs beside the rest."""
        return ()

    def _published(self, inventory: Inventory) -> None:
        self.board.put_inventory(inventory)
        self.driver.look_soon()

    def _changed(self) -> None:
        self.cache.poke()
        self.driver.look_soon()
