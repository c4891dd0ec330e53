"""`nri-gpu run` as a process, against a scripted runtime: signals, the service manager, files, the log."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from secrets import token_hex
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.errors import Exit
from nri_gpu.driver.stage import LOCK_FILE
from nri_gpu.nri.subscription import Event
from nri_gpu.system.cgroups import DEVICES, UNIFIED
from nri_gpu.system.storage import open_lock, try_lock
from nri_gpu.ttrpc import Status
from tests.support import nri_messages as nri
from tests.support.cgroup import Cgroup, OccupiedCgroup, host_cgroup
from tests.support.daemon import ENVIRONMENT, Launch, NriGpu
from tests.support.driver_root import make_driver_root
from tests.support.nri_messages import CRI_O, NRI_0_8, REQUEST_TIMEOUT_NS, Flavour
from tests.support.scripted_runtime import Listener, ScriptedRuntime, until
from tests.support.waiting import aside, in_a_loop

ENDS_S: Final = 10.0


@pytest.fixture
def launch(folder: Path) -> Launch:
    return Launch(folder, socket=folder / "nri.sock", driver_root=folder / "driver")


async def serving(daemon: NriGpu, listener: Listener, flavour: Flavour = NRI_0_8) -> ScriptedRuntime:
    """A runtime through its handshake, with a plugin that knows its node."""
    runtime = await listener.accept(20)
    await runtime.handshake(flavour)
    await aside(lambda: daemon.wait_logged("inventory changed"))
    return runtime


async def granted(
    runtime: ScriptedRuntime, claim: str = "1", name: str = "train"
) -> tuple[pb.PodSandbox, pb.Container]:
    """A container with its GPUs, as later requests show it. Staging may take a moment, so it is asked for again."""
    pod = nri.asking(claim, name)
    made = nri.container(pod)
    for _ in range(100):
        reply = await runtime.create(pod, made)
        if isinstance(reply, pb.CreateContainerResponse):
            return pod, nri.adjusted(made, reply)
        assert "[node-not-ready]" in reply.message
        await asyncio.sleep(0.05)
    raise AssertionError(reply)


async def refused(runtime: ScriptedRuntime) -> Status:
    pod = nri.asking("1", "refused")
    reply = await runtime.create(pod, nri.container(pod))
    assert isinstance(reply, Status)
    return reply


@in_a_loop
async def test_a_daemon_that_stood_still_in_synchronize_connects_again(launch: Launch) -> None:
    """The runtime gave up meanwhile and says nothing of it: on this connection no container would be granted again."""
    async with Listener(launch.socket) as listener:
        with NriGpu(launch) as daemon:
            runtime = await listener.accept(20)
            await runtime.register()
            os.kill(daemon.pid, signal.SIGSTOP)
            asked = asyncio.create_task(runtime.synchronize())
            await asyncio.sleep(REQUEST_TIMEOUT_NS / 1e9)
            os.kill(daemon.pid, signal.SIGCONT)
            await asked
            await runtime.ended()
            await granted(await serving(daemon, listener))
            assert "nri-gpu stood still for " in daemon.log()
            assert daemon.log().count("connection ended, reconnecting") == 1


@in_a_loop
async def test_on_cri_o_a_container_that_was_never_started_holds_its_gpu_while_a_process_is_in_its_cgroup(
    launch: Launch, request: pytest.FixtureRequest
) -> None:
    """As one that it restored from a checkpoint."""
    async with Listener(launch.socket) as listener:
        with NriGpu(launch.with_policy("schema = 1\n[ledger]\ncreated_grace_s = 5\n")) as daemon:
            runtime = await serving(daemon, listener, CRI_O)
            _, made = await granted(
                runtime, "device=0", f"restored-{token_hex(8)}"
            )  # all the machine's cgroups are read
            cgroup = OccupiedCgroup(DEVICES if host_cgroup() is Cgroup.V1 else UNIFIED, f"crio-{made.id}.scope")
            request.addfinalizer(cgroup.remove)
            await asyncio.sleep(7)
            next_one = nri.asking("device=0", "next")
            reply = await runtime.create(next_one, nri.container(next_one))
            assert isinstance(reply, Status)
            assert "[gpu-busy]" in reply.message
            cgroup.end()
            await aside(lambda: daemon.wait_held({}))
            await granted(runtime, "device=0", "next")


@in_a_loop
async def test_ready_is_said_only_after_synchronize(launch: Launch) -> None:
    environment = {"WATCHDOG_USEC": "200000"}
    async with Listener(launch.socket) as listener:
        with NriGpu(replace(launch, environment=environment)) as daemon:
            runtime = await listener.accept(20)
            await runtime.register()
            await aside(lambda: daemon.wait_logged("registered"))
            await until("the watchdog to be fed", lambda: daemon.has_notified("WATCHDOG=1"))
            assert not daemon.has_notified("READY=1")
            await runtime.synchronize()
            await aside(daemon.wait_ready)
            assert daemon.has_notified(f"STATUS=serving {launch.socket}")
            fed = daemon.notified.count("WATCHDOG=1")
            await until("more of it", lambda: daemon.has_notified("!") or daemon.notified.count("WATCHDOG=1") > fed + 3)
            runtime.close()
            await until("word of it", lambda: daemon.has_notified("STATUS=not connected: "))
            assert await aside(daemon.terminate) == Exit.OK
            assert daemon.has_notified("STOPPING=1")


@in_a_loop
async def test_ready_is_said_only_after_the_drivers_files_are_staged(launch: Launch) -> None:
    """The kubelet starts then, and its first container must not be refused for files that are being copied."""
    assert launch.driver_root
    make_driver_root(launch.driver_root)
    stage = launch.base / "drivers"
    stage.mkdir()
    lock = open_lock(stage / LOCK_FILE)
    assert try_lock(lock)
    async with Listener(launch.socket) as listener:
        with NriGpu(launch) as daemon:
            runtime = await listener.accept(20)
            await runtime.register()
            await runtime.synchronize()
            await aside(lambda: daemon.wait_logged("ledger rebuilt"))
            assert not daemon.has_notified("READY=1")
            os.close(lock)
            await aside(daemon.wait_ready)
            pod = nri.asking("1", "first")
            assert isinstance(await runtime.create(pod, nri.container(pod)), pb.CreateContainerResponse)


@pytest.mark.parametrize(
    ("change", "environment", "words"),
    [
        pytest.param({"index": "5"}, {}, "--index: must be two digits", id="index"),
        pytest.param({"socket": Path("relative")}, {}, "--socket: must be an absolute path", id="relative socket"),
        *(
            pytest.param({}, {"NRI_PLUGIN_SOCKET": value}, f"NRI_PLUGIN_SOCKET={value}", id=f"launched with {value}")
            for value in ("three", "999", "-1", "0")
        ),
    ],
)
def test_options_that_cannot_be(
    launch: Launch, change: dict[str, object], environment: dict[str, str], words: str
) -> None:
    command = [sys.executable, "-m", "nri_gpu", "run", *replace(launch, **change).arguments()]
    done = subprocess.run(
        command, env=ENVIRONMENT | environment, capture_output=True, text=True, check=False, timeout=20
    )
    assert done.returncode == Exit.USAGE
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@in_a_loop
async def test_the_log_holds_nothing_of_an_environment(launch: Launch) -> None:
    async with Listener(launch.socket) as listener:
        with NriGpu(replace(launch, log_level="TRACE")) as daemon:
            runtime = await serving(daemon, listener)
            pod, made = await granted(runtime, "all")
            await runtime.event(Event.START_CONTAINER, pod, made)
            assert "[gpu-busy]" in (await refused(runtime)).message
            assert (await runtime.call("CreateContainer", b"\xff gpu.nri.io hunter2-do-not-log")).status.code == 3
            away = nri.asking("1", "away")
            assert not (await runtime.event(Event.START_CONTAINER, away, nri.container(away))).ok
            await runtime.event(Event.REMOVE_CONTAINER, pod, made)
            await aside(lambda: daemon.wait_logged("start refused"))
            line = await aside(lambda: daemon.wait_logged("GPU granted"))
            assert "namespace=ml pod_name=train container_name=main pod_uid=uid-train" in line
            assert "elapsed_ms=" in line
            assert len([each for each in daemon.log().splitlines() if "GPU granted" in each]) == 1
            assert "hunter2" not in daemon.log()
            assert "SECRET" not in daemon.log()


@in_a_loop
async def test_a_stalled_log_never_blocks_a_reply(launch: Launch) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "nri_gpu", "run", *launch.arguments()]
    async with Listener(launch.socket) as listener:
        process = await aside(lambda: subprocess.Popen(command, env=ENVIRONMENT, stderr=writing))
        try:
            runtime = await listener.accept(20)
            await runtime.handshake()
            pod = nri.asking("device=99")
            slowest_s = 0.0
            for _ in range(1500):  # some 300 bytes of log each: several times what a pipe holds
                began = time.monotonic()
                await runtime.create(pod, nri.container(pod))
                slowest_s = max(slowest_s, time.monotonic() - began)
            assert slowest_s < 2.0  # after which a runtime starts the container without us
            assert len(select.select([], [writing], [], 0)[1]) == 0  # the pipe is full indeed
            process.terminate()
            assert await aside(lambda: process.wait(ENDS_S)) == Exit.OK
        finally:
            process.kill()
            process.wait()
            os.close(reading)
            os.close(writing)
