"""The daemon's parts around a machine that is made up at its edges alone: NVML's library, /proc, /sys and the runtime.

While anything is done to the machine, a client goes on creating containers for GPU 0, and no answer of NVML's is let
through before a container was answered that was asked for after the question: one that waited for NVML would wait for
ever. Deadlines go by a clock that a test moves by hand, so that nothing hangs but what is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.daemon.snapshot import EvidenceSource, SnapshotController
from nri_gpu.domain.node import Inventory
from nri_gpu.driver.controller import DriverController
from nri_gpu.inventory.child import Deadlines
from nri_gpu.inventory.controller import InventoryCache
from nri_gpu.inventory.kernel import HostFolders
from nri_gpu.inventory.node_watch import NodeWatch, Pace
from nri_gpu.inventory.source import NvmlSource, Source
from nri_gpu.nri.events import Event
from nri_gpu.plugin.dependencies import PluginDependencies
from nri_gpu.plugin.handlers import Plugin
from nri_gpu.policy.model import DriverSettings, InventorySettings, Policy
from nri_gpu.system.state import Changed, NodeState
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.driver_root import make_driver_root
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, evidence
from tests.support.plugin import NoRecorder
from tests.support.scripted_runtime import until

DRIVER: Final = "580.95.05"
MAJORS: Final = "Character devices:\n195 nvidia\n195 nvidiactl\n508 nvidia-uvm\n510 nvidia-caps\n"
NO_MAJORS: Final = "Character devices:\n  1 mem\n"
DEADLINES: Final = Deadlines()
KEY: Final = bytes(32)


def gpus(count: int) -> list[FakeGpu]:
    return [FakeGpu(minor=at, uuid=f"GPU-{at:x}fa01700-0000-4000-8000-000000000000") for at in range(count)]


class Clock:
    """Monotonic seconds that pass when a test says so; the real ones beside them are for what is waited for."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._running: list[tuple[float, asyncio.Timeout]] = []

    def __call__(self) -> float:
        return self._now

    def limit(self, seconds: float) -> asyncio.Timeout:
        """In the place of asyncio.timeout."""
        timeout = asyncio.timeout(None)
        self._running.append((self._now + seconds, timeout))
        return timeout

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self._now += seconds
        due = [timeout for when, timeout in self._running if when <= self._now]
        self._running = [each for each in self._running if each[1] not in due]
        for timeout in due:
            with contextlib.suppress(RuntimeError):  # what it was for is over
                timeout.reschedule(asyncio.get_running_loop().time())


class Watched(NvmlSource):
    """The source, which tells when it asks, and keeps an answer back until a container was created meanwhile."""

    def __init__(self, trace: list[str], base: Path, clock: Clock) -> None:
        super().__init__(base / "root", folders=HostFolders(proc=base / "proc", sys=base / "sys"), limit=clock.limit)
        self._trace = trace
        self.creating = False
        self.asked = 0

    async def refresh(self) -> Inventory:
        creating = self.creating
        self._trace.append("ask")
        try:
            return await super().refresh()
        finally:
            if creating and self.creating:
                await until("a container to be answered before NVML is", lambda: self._trace[-1] == "create", 20.0)
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
        self.clock = Clock()
        self.source = Watched(self.trace, base, self.clock)
        self.node_state = NodeState(Inventory(taken_at=0, fault="starting"), "looking")
        self.cache = InventoryCache(
            self._judged(self.source), self._published, self.faults.append, refresh_s=3600, monotonic=self.clock
        )
        self._later: list[Callable[[], None]] = []
        needs = PluginDependencies(time.monotonic, self._later.append, NoRecorder())
        self.plugin = Plugin(self.node_state, needs, KEY)
        self.node_state.subscribe(self._ledger_changed, Changed.LEDGER)
        self.driver = DriverController(
            Policy(
                driver=DriverSettings(root=str(self.root), stage_dir=str(base / "stage")),
                inventory=InventorySettings(refresh_s=1),
            ),
            base / "state",
            self.node_state,
            simulated=False,
            held=lambda: None,
            module_changed=self.cache.poke,
            module=lambda: self.module,
        )
        pace = Pace(look_s=0.02, quiet_s=0.0)
        self.watch = NodeWatch(self.source.kernel_view, self._changed, folders=(), uevents=False, pace=pace)
        (base / "state").mkdir(exist_ok=True)
        host = EvidenceSource(
            driver_root=self.root,
            library_dirs=(),
            stage_dir=base / "stage",
            look=self.source.kernel_view,
            answered=lambda: self.source.answered,
            scanned=lambda: self.driver.scanned,
            module=lambda: self.module,
        )
        self.snapshots = SnapshotController(base / "state", KEY, host, self.node_state)
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
        begun = len(self.trace)
        self.source.creating = True
        try:
            yield
        finally:
            self.source.creating = False
            answers = self.answers(self.trace[begun:])
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self.driver.close()
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
        assert all(answers)

    async def refreshed(self) -> None:
        """After one more answer to a question asked from now on."""
        asked = self.source.asked
        self.cache.poke()
        await self.until("a refresh", lambda: self.source.asked > asked and self.trace[-1] != "ask")
        if self.trace[-1] == "ask":
            await self.until("it to end", lambda: self.trace[-1] == "answer")

    def calls(self) -> list[str]:
        """Of NVML's functions, up to now."""
        return evidence(self.root, "calls").split()

    async def hangs(self, function: str, limit_s: float) -> None:
        """NVML is in that call; containers are created; a limit later the hang is noticed, and not before."""
        asked = -1
        while asked != len(self.calls()):  # else it was a call of before the hang was played
            await self.until(f"a call of {function}", lambda: self.calls()[-1:] == [function])
            asked, before = len(self.calls()), self.created
            await self.until("creates to go on", lambda: self.created > before + 10)  # noqa: B023 - awaited here
        age_s, before = self.cache.age_s() or 0.0, self.created
        self.clock.advance(limit_s - 0.5)
        await self.until("creates to go on", lambda: self.created > before + 5)
        assert "did not return" not in self.cache.fault
        self.clock.advance(1.0)
        sentence = f" did not return within {limit_s:g} s; the NVML process was killed"
        await self.until("the hang to be noticed", lambda: sentence in self.cache.fault)
        assert self.cache.age_s() == age_s + limit_s + 0.5  # what is believed ages, and says so
        assert self.calls()[-1] == function

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
        self.plugin.lifecycle(nri.event(Event.REMOVE_CONTAINER, of, made)[1])
        self._settle()
        return ""

    def answered_while_asking(self) -> int:
        """In how many of NVML's answers a container did not have to wait for it."""
        return sum(self.answers(self.trace))

    @staticmethod
    def answers(trace: Sequence[str]) -> list[bool]:
        """For each of NVML's answers, whether a container was answered between the question and it."""
        found, inside, created = [], False, False
        for word in trace:
            if word == "answer" and inside:
                found.append(created)
            inside = inside or word == "ask"
            created = (created or word == "create") and word != "ask"
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

    def _ledger_changed(self) -> None:
        """Somebody holds something else."""

    def _more(self) -> Sequence[Coroutine[None, None, None]]:
        """What runs beside the rest."""
        return ()

    def _published(self, inventory: Inventory) -> None:
        self.node_state.put_inventory(inventory)
        self.driver.look_soon()

    def _changed(self) -> None:
        self.cache.poke()
        self.driver.look_soon()
