"""`nri-gpu run` and `nri-gpu guard` as two processes before a runtime that validates (NRI 0.10 and newer).

Real ones are in tests/conformance/test_guard.py. What hostile plugins do is played by a scripted runtime over the real
wire: it asks all to create, merges what they answer, and asks those that subscribed whether that may be. One that does
not answer in time is gone, and so is the container (containerd/nri: pkg/adaptation/adaptation.go,
validateContainerAdjustment).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.nri.subscription import Event
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.daemon import Launch, NriGpu
from tests.support.errors import HarnessError
from tests.support.guard import NriGuard
from tests.support.nri_messages import NRI_0_10, NRI_0_12, Flavour
from tests.support.scripted_runtime import Listener, ScriptedRuntime, within
from tests.support.waiting import aside, in_a_loop

REQUEST_TIMEOUT_S: Final = 0.5  # a real one has 2
VALIDATES: Final = 1 << (Event.VALIDATE_CONTAINER_ADJUSTMENT - 1)
INJECTOR, GUARD = "10-nri-gpu", "90-nri-gpu-guard"
each_validating = pytest.mark.parametrize("flavour", [NRI_0_10, NRI_0_12], ids=["nri 0.10", "nri 0.12"])


@dataclass
class Runtime:
    """The plugins' connections, by `NN-name`, and what a runtime does with them."""

    plugins: dict[str, ScriptedRuntime]

    async def create(
        self, of: pb.PodSandbox, made: pb.Container, others: dict[str, pb.CreateContainerResponse] | None = None
    ) -> str:
        """CreateContainer as CRI's client sees it: why it failed, empty where it did not."""
        replies = dict(others or {})
        silent = ""
        try:
            reply = await within("the reply", self.plugins[INJECTOR].create(of, made), REQUEST_TIMEOUT_S)
            if isinstance(reply, Status):
                return reply.message
            replies[INJECTOR] = reply
        except (HarnessError, OSError):
            silent = INJECTOR  # NRI goes on without it, but for the validation that it subscribed to
        asked = [name for name in self.plugins if name != silent]
        verdicts = [await self.plugins[name].validate(of, made, replies) for name in asked]
        return next(filter(None, verdicts), f"{silent} is gone" if silent else "")


@pytest.fixture
def launch(folder: Path) -> Launch:
    return Launch(folder / "d", socket=folder / "nri.sock", driver_root=folder / "driver")


@asynccontextmanager
async def both(launch: Launch, flavour: Flavour) -> AsyncIterator[tuple[Runtime, NriGpu, NriGuard]]:
    """A runtime with both plugins registered, and the daemon ready to grant."""
    async with Listener(launch.socket) as listener:
        with NriGpu(launch) as daemon, NriGuard(launch) as guard:
            runtime = Runtime({})
            for _ in range(2):
                plugin = await listener.accept(20)
                said = await plugin.handshake(flavour)
                assert said.events & VALIDATES
                runtime.plugins[f"{said.index}-{said.name}"] = plugin
            assert set(runtime.plugins) == {INJECTOR, GUARD}
            await aside(lambda: daemon.wait_logged("inventory changed"))
            yield runtime, daemon, guard
            os.kill(daemon.pid, signal.SIGCONT)


async def created(runtime: Runtime, of: pb.PodSandbox) -> str:
    """Created, once the driver's files are staged."""
    for _ in range(200):
        said = await runtime.create(of, nri.container(of))
        if "[node-not-ready]" not in said:
            return said
        await asyncio.sleep(0.05)
    return said


@each_validating
@in_a_loop
async def test_both_agree_on_what_one_granted(launch: Launch, flavour: Flavour) -> None:
    async with both(launch, flavour) as (runtime, _, guard):
        assert await created(runtime, nri.asking("2")) == ""
        assert await created(runtime, nri.asking("none", "out")) == ""
        assert await created(runtime, nri.pod("quiet")) == ""
        await aside(lambda: guard.wait_logged("guarding"))
        assert guard.seen()["validates"]
        assert guard.seen()["connected"]


@each_validating
@in_a_loop
async def test_a_gpu_that_another_plugin_adds_is_rejected(launch: Launch, flavour: Flavour) -> None:
    gpu = pb.LinuxContainerAdjustment(devices=[pb.LinuxDevice(path="/dev/nvidia3", type="c", major=195, minor=3)])
    other = {"20-other": pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(linux=gpu))}
    async with both(launch, flavour) as (runtime, _, guard):
        assert await created(runtime, nri.asking("1")) == ""
        for pod in (nri.asking("1", "again"), nri.pod("quiet")):
            assert "NRI plugin 20-other added /dev/nvidia3" in await runtime.create(pod, nri.container(pod), other)
        await aside(lambda: guard.wait_logged("container rejected"))


@each_validating
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
@in_a_loop
async def test_a_daemon_lost_during_a_create_fails_it(launch: Launch, flavour: Flavour, number: signal.Signals) -> None:
    """Up to NRI 0.9 this container is created without its GPUs, and only its start is refused."""
    async with both(launch, flavour) as (runtime, daemon, _):
        assert await created(runtime, nri.asking("1")) == ""
        os.kill(daemon.pid, number)
        late = nri.asking("1", "late")
        assert "[not-granted]: gpu.nri.io asks for GPUs, but nri-gpu granted it none" in await runtime.create(
            late, nri.container(late)
        )
        del runtime.plugins[INJECTOR]  # what a runtime does after the first silence
        quiet = nri.pod("quiet")
        assert await runtime.plugins[GUARD].validate(quiet, nri.container(quiet), {}) == ""
