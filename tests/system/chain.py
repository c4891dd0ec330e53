"""The whole chain: a scripted runtime on a real socket, the daemon as a process of its own, its NVML process.

Only the edges are made up: NVML's library, and what of /proc and /sys tells of NVIDIA's modules and GPUs. A client
creates containers for GPU 0 all the while, and the library's own notes tell what it was doing meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.cli.ask_daemon import ask as ask_daemon
from nri_gpu.domain.names import CONTROL_SOCKET
from nri_gpu.nri.subscription import Event
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.daemon import Launch
from tests.support.driver_root import make_driver_root
from tests.support.kernel import NriGpuOnNvidia, make_information, make_pci
from tests.support.nvml import Act, FakeGpu, FakeMig, build_fake_nvml, configure, evidence
from tests.support.nvml.build import LIB_DIR
from tests.support.scripted_runtime import Listener, ScriptedRuntime, until

DRIVER: Final = "580.95.05"
PATIENCE_S: Final = 20.0
PROMPT_S: Final = 1.0  # what a create may take on a busy machine; the shortest deadline of a call is longer
LISTENER: Final = "nri_gpu.health.nvml_events"
INIT, HANDLE, NAME = "nvmlInitWithFlags", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName"
# A hang of the driver is to be noticed within the patience of a test; everything else is as it is shipped.
PROGRAM: Final = """
import sys
from nri_gpu.inventory.nvml_child import Deadlines
from nri_gpu.inventory.nvml_source import NvmlSource
NvmlSource.__init__.__kwdefaults__["deadlines"] = Deadlines(call_s=1.5, slow_call_s=2.0, files_s=2.0)
from nri_gpu.cli.main import main
sys.exit(main())
"""


POLICY: Final = """
[inventory]
refresh_s = {refresh_s}
[health]
events = "{events}"
other_xids = "bad"
hold_down_s = 1
reprobe_s = 1
"""


def gpus(count: int) -> list[FakeGpu]:
    return [FakeGpu(minor=at, uuid=f"GPU-{at:x}fa01700-0000-4000-8000-000000000000") for at in range(count)]


TWO: Final = gpus(2)
PARTS: Final = (
    FakeMig(place=0, gi=1, uuid="MIG-a0000000-0000-4000-8000-000000000000"),
    FakeMig(place=1, gi=2, uuid="MIG-b0000000-0000-4000-8000-000000000000"),
)
CUT: Final = [TWO[0], replace(TWO[1], mig=(1, 1), parts=PARTS)]


class Daemon(NriGpuOnNvidia):
    """With shorter deadlines."""

    def words(self) -> list[str]:
        return [sys.executable, "-c", PROGRAM]


class Chain:
    """A machine, the daemon on it, and the runtime that it serves."""

    def __init__(
        self,
        folder: Path,
        machine: Sequence[FakeGpu],
        *faults: Act,
        version: str | None = DRIVER,
        refresh_s: int = 1,
        events: str = "none",
    ) -> None:
        """version: of the kernel's modules; None for none yet. refresh_s: between looks without cause.

        events: the GPUs that are listened to; without any there is one process of NVML's.
        """
        self.root = _driver(folder / "root", machine, *faults)
        policy = folder / "policy.toml"
        policy.write_text(POLICY.format(refresh_s=refresh_s, events=events))
        socket = folder / "nri.sock"
        self.launch = Launch(folder / "d", socket=socket, topology=None, driver_root=self.root, policy=policy)
        self.daemon = Daemon(self.launch, version)
        self._listener = Listener(socket)
        self._runtime: ScriptedRuntime | None = None
        self._one_call = asyncio.Lock()
        self.refused: list[str] = []
        self.created = 0
        self.slowest_s = 0.0

    # --- what happens to the machine ---

    def play(self, machine: Sequence[FakeGpu], *faults: Act) -> None:
        """NVML says this from now on; the daemon is not told."""
        configure(self.root, machine, faults, driver=DRIVER)

    def upgrade(self, version: str) -> None:
        """Another driver's files, and then its modules."""
        fresh = _driver(self.root.with_name("fresh"), TWO, version=version)
        self.root.rename(self.root.with_name("old"))
        fresh.rename(self.root)
        self.daemon.unload()
        self.daemon.load(version)

    def children(self, module: str = "nri_gpu.inventory.nvml_program") -> list[int]:
        """The processes that ask NVML, or listen to it."""
        found = Path(f"/proc/{self.daemon.pid}/task/{self.daemon.pid}/children").read_text().split()
        return [int(each) for each in found if module.encode() in command(int(each))]

    def kill(self, module: str = "nri_gpu.inventory.nvml_program") -> None:
        """The only one of them."""
        [child] = self.children(module)
        os.kill(child, signal.SIGKILL)

    def calls(self) -> list[str]:
        """All calls that the library was asked for."""
        return evidence(self.root, "calls").split()

    def looks(self) -> int:
        """How often NVML was started, which is once for each look."""
        return self.calls().count("nvmlInitWithFlags")

    async def at_rest(self) -> int:
        """Looks up to now, once nothing gives rise to more."""
        looks = -1
        while looks != self.looks():
            looks = self.looks()
            await asyncio.sleep(1.5)  # more than there is between two glances
        return looks

    def on_the_bus(self, bus_id: str, driver: str, **told: str) -> None:
        """The kernel shows this GPU."""
        make_pci(self.daemon.bus, bus_id, driver)
        if told:
            make_information(self.daemon.proc_driver, bus_id, told)

    def capabilities(self, *instances: int) -> None:
        """MIG instances of GPU 1, each with one compute instance, as the driver's own files have them."""
        for instance in instances:
            for name, minor in ((f"gi{instance}", 138 + 9 * instance), (f"gi{instance}/ci0", 139 + 9 * instance)):
                self.capability(name).write_text(
                    f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
                )

    def capability(self, name: str) -> Path:
        """The file of one of them."""
        file = self.daemon.proc_driver / "nvidia/capabilities/gpu1/mig" / name / "access"
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    # --- what the runtime does ---

    @property
    def runtime(self) -> ScriptedRuntime:
        """The connection to the daemon."""
        assert self._runtime
        return self._runtime

    async def reconnect(self, pods: Sequence[pb.PodSandbox] = (), containers: Sequence[pb.Container] = ()) -> None:
        """The runtime goes, and has these when it is back."""
        self.runtime.close()
        self._runtime = await self._listener.accept(PATIENCE_S)
        await self._runtime.handshake(pods=pods, containers=containers)

    # --- what the daemon does ---

    @asynccontextmanager
    async def connected(self, *, killed: bool = False) -> AsyncIterator[None]:
        """With the daemon running and serving. killed: by whoever uses it."""
        async with self._listener:
            self.daemon.start()
            try:
                self._runtime = await self._listener.accept(PATIENCE_S)
                await self._runtime.handshake()
                yield
            finally:
                code = 0 if killed else await asyncio.to_thread(self.daemon.terminate)
                self.daemon.__exit__()
        assert code == 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The same, and a client creates for GPU 0 from the first grant to the end."""
        async with self.connected():
            await self.until("the first grant", "device=0")
            creating = asyncio.create_task(self._create_for_ever())
            try:
                yield
                await self.goes_on()
            finally:
                creating.cancel()
                [ended] = await asyncio.gather(creating, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended
        assert self.slowest_s < PROMPT_S

    async def goes_on(self) -> None:
        """Until more containers were created than up to now."""
        before = self.created
        await until("creates to go on", lambda: self.created > before + 2, PATIENCE_S)

    async def hangs(self, function: str) -> None:
        """Until the library is in that call, and containers were created while it was in it."""
        await until(f"a call of {function}", lambda: self.calls()[-1:] == [function], PATIENCE_S)
        asked, before = len(self.calls()), self.created
        await until("its end", lambda: len(self.calls()) > asked, PATIENCE_S)
        assert self.created > before + 2  # all of these were answered in the time that one call was not

    async def until(self, what: str, claim: str, says: str = "") -> None:
        """Until a container that asks so is answered so; a grant is an empty answer."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            said = await self.ask(claim)
            if (says in said) if says else not said:
                return
            assert time.monotonic() < deadline, f"{what}: a container that asks {claim} is told {said!r}"
            await asyncio.sleep(0.02)

    async def shown(self, what: str, fact: Callable[[Mapping[str, Any]], object]) -> Mapping[str, Any]:
        """The status, once it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not fact(said := await self.status()):
            assert time.monotonic() < deadline, f"{what}: the status is {said}"
            await asyncio.sleep(0.05)
        return said

    async def status(self) -> Mapping[str, Any]:
        """What `nri-gpu status` is told."""
        return await asyncio.to_thread(ask_daemon, self.launch.state / CONTROL_SOCKET, "status", dict)

    async def ask(self, claim: str) -> str:
        """What a container that asks is told, empty for yes. It is gone at once."""
        assert self._runtime
        async with self._one_call:
            of = nri.asking(claim, "probe")
            made = nri.container(of)
            reply = await self._runtime.create(of, made)
            if isinstance(reply, Status):
                return reply.message
            assert isinstance(reply, pb.CreateContainerResponse)
            assert reply.adjust.linux.devices
            await self._runtime.event(Event.REMOVE_CONTAINER, of, made)
        return ""

    async def create(self, of: pb.PodSandbox, made: pb.Container) -> None:
        """A container that is granted what it asks for, and stays."""
        async with self._one_call:
            assert isinstance(await self.runtime.create(of, made), pb.CreateContainerResponse)

    async def _create_for_ever(self) -> None:
        while True:
            began = time.monotonic()
            if refusal := await self.ask("device=0"):
                self.refused.append(refusal)
            else:
                self.created += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await asyncio.sleep(0.01)


def _driver(root: Path, machine: Sequence[FakeGpu], *faults: Act, version: str = DRIVER) -> Path:
    build_fake_nvml(make_driver_root(root, version), machine, faults, driver=version)
    for note in ("calls", "environ", "events", "status", "usage"):
        (root / LIB_DIR / f"fake-nvml.{note}").touch()  # a new file would make it another driver's folder
    return root


def command(pid: int) -> bytes:
    """What that process runs; empty where it ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def listens(chain: Chain, times: int = 1) -> None:
    """Somebody began to listen to both GPUs, so often."""
    said = "listening for GPU errors gpus=2"
    await until("somebody to listen", lambda: chain.daemon.log().count(said) >= times, PATIENCE_S)
