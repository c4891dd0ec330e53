"""`nri-gpu run` as a process, against a scripted runtime: signals, the service manager, files, the log."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from nri_gpu._pb import nri_pb2 as pb
from nri_gpu.domain.errors import Exit
from nri_gpu.nri.events import Event
from nri_gpu.ttrpc import Status, StatusCode
from tests.support import nri_messages as nri
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.scripted_runtime import Listener, ScriptedRuntime, until, within
from tests.support.waiting import aside, in_a_loop

BAD_POLICY: Final = "[plugin]\nindex = 5\n"
GOOD_POLICY: Final = '[namespaces]\nallow = ["ml"]\n'
CLOSED_POLICY: Final = '[namespaces]\nallow = ["nobody"]\n'
ENDS_S: Final = 10.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder short enough for the path of a socket in it."""
    with tempfile.TemporaryDirectory(prefix="nri-gpu-test-") as made:
        yield Path(made)


@pytest.fixture
def launch(folder: Path) -> Launch:
    return Launch(folder, socket=folder / "nri.sock", driver_root=folder / "driver")


async def serving(daemon: NriGpu, listener: Listener) -> ScriptedRuntime:
    """A runtime through its handshake, with a plugin that knows its node."""
    runtime = await listener.accept(20)
    await runtime.handshake()
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
            assert daemon.has_notified(f"STATUS=serving {launch.socket}, 0 grants")
            fed = daemon.notified.count("WATCHDOG=1")
            await until("more of it", lambda: daemon.has_notified("!") or daemon.notified.count("WATCHDOG=1") > fed + 3)
            runtime.close()
            await until("word of it", lambda: daemon.has_notified("STATUS=not connected: "))
            assert await aside(daemon.terminate) == Exit.OK
            assert daemon.has_notified("STOPPING=1")


@in_a_loop
async def test_an_abstract_service_manager(launch: Launch) -> None:
    name = f"nri-gpu-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.setblocking(False)
        async with Listener(launch.socket) as listener:
            with NriGpu(replace(launch, environment={"NOTIFY_SOCKET": f"@{name}"})) as daemon:
                await serving(daemon, listener)
                heard = b""
                while b"READY=1" not in heard:
                    heard = await within("READY", asyncio.get_running_loop().sock_recv(manager, 4096))


@in_a_loop
async def test_sigterm_answers_calls_in_flight_first(launch: Launch) -> None:
    async with Listener(launch.socket) as listener:
        with NriGpu(launch) as daemon:
            runtime = await serving(daemon, listener)
            await granted(runtime)
            pod = nri.asking("1", "last")
            payload = nri.create(pod, nri.container(pod))
            await runtime.write(b"".join(runtime.request("CreateContainer", payload) for _ in range(20)))
            began = time.monotonic()
            ending = asyncio.create_task(aside(daemon.terminate))
            assert all(answer.status.ok for answer in await runtime.answers(20))
            await runtime.ended()
            assert await ending == Exit.OK
            assert time.monotonic() - began < 2
            assert "stopped" in daemon.log().splitlines()[-1]


@in_a_loop
async def test_sighup_with_a_broken_policy_keeps_the_old_one_and_says_so(launch: Launch, folder: Path) -> None:
    policy = folder / "policy.toml"
    policy.write_text(CLOSED_POLICY)
    async with Listener(launch.socket) as listener:
        with NriGpu(replace(launch, policy=policy)) as daemon:
            runtime = await serving(daemon, listener)
            assert "[not-allowed]" in (await refused(runtime)).message
            policy.write_text(BAD_POLICY)
            daemon.hang_up()
            line = await aside(lambda: daemon.wait_logged("policy not reloaded, the old one stays"))
            assert f"{policy}:2: plugin.index: must be a string" in line
            assert "[not-allowed]" in (await refused(runtime)).message
            policy.write_text(GOOD_POLICY)
            daemon.hang_up()
            await aside(lambda: daemon.wait_logged("policy reloaded"))
            await granted(runtime)


@in_a_loop
async def test_a_start_on_a_broken_policy_uses_the_last_good_one(launch: Launch, folder: Path) -> None:
    policy = folder / "policy.toml"
    policy.write_text(CLOSED_POLICY)
    daemon = NriGpu(replace(launch, policy=policy))
    async with Listener(launch.socket) as listener:
        with daemon:
            await serving(daemon, listener)
        policy.write_text(BAD_POLICY)
        with daemon:
            runtime = await serving(daemon, listener)
            await aside(lambda: daemon.wait_logged("started on the last good policy"))
            assert "plugin.index" in await aside(lambda: daemon.wait_logged("policy not usable"))
            assert "[not-allowed]" in (await refused(runtime)).message


@in_a_loop
async def test_with_no_good_policy_at_all_it_refuses_with_the_fault(launch: Launch, folder: Path) -> None:
    policy = folder / "policy.toml"
    policy.write_text(BAD_POLICY)
    async with Listener(launch.socket) as listener:
        with NriGpu(replace(launch, policy=policy)) as daemon:
            runtime = await serving(daemon, listener)
            status = await refused(runtime)
            assert status.code is StatusCode.FAILED_PRECONDITION
            assert "[bad-policy]" in status.message
            assert f"{policy}:2: plugin.index: must be a string" in status.message
            plain = nri.pod()
            assert isinstance(await runtime.create(plain, nri.container(plain)), pb.CreateContainerResponse)


@in_a_loop
async def test_killed_and_started_again_the_ledger_is_the_same(launch: Launch) -> None:
    daemon = NriGpu(launch)
    async with Listener(launch.socket) as listener:
        with daemon:
            first = await serving(daemon, listener)
            pod, made = await granted(first, "device=0,1;mode=shared")
            other, exclusive = await granted(first, "device=3", "other")
            await first.event(Event.START_CONTAINER, pod, made)
            await until("the ledger's file", lambda: len(daemon.ledger()["grants"]) == 2)
            before = daemon.ledger()
            await aside(daemon.kill)
            daemon.start()
            again = await listener.accept(20)
            await again.register()
            await again.synchronize([pod, other], [nri.running(made), nri.created(exclusive)])
            await aside(daemon.wait_ready)
            assert daemon.has_notified("2 grants")
            await until("the ledger's file", lambda: daemon.ledger() == before)
            taken = nri.asking("device=3", "third")
            await aside(lambda: daemon.wait_logged("driver files not found"))
            reply = await again.create(taken, nri.container(taken))
            while isinstance(reply, Status) and "[node-not-ready]" in reply.message:
                reply = await again.create(taken, nri.container(taken))
            assert isinstance(reply, Status)
            assert "[gpu-busy]" in reply.message


@in_a_loop
async def test_two_daemons_on_one_state_folder(launch: Launch) -> None:
    async with Listener(launch.socket) as listener:
        with NriGpu(launch) as daemon:
            await serving(daemon, listener)
            command = [sys.executable, "-m", "nri_gpu", "run", *launch.arguments()]
            done = await aside(lambda: subprocess.run(command, capture_output=True, text=True, check=False, timeout=20))
            assert done.returncode == Exit.UNAVAILABLE
            assert f"another nri-gpu (pid {daemon.pid}) runs with state folder {launch.state}" in done.stderr


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"index": "5"}, Exit.USAGE, "--index: must be two digits"),
        ({"socket": Path("relative")}, Exit.USAGE, "--socket: must be an absolute path"),
        ({"log_level": "LOUD"}, Exit.USAGE, "invalid choice"),
    ],
)
def test_options_that_cannot_be(launch: Launch, change: dict[str, object], code: Exit, words: str) -> None:
    wrong = replace(launch, **change)
    command = [sys.executable, "-m", "nri_gpu", "run", *wrong.arguments()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_state_folder_that_cannot_be(launch: Launch) -> None:
    launch.state.write_text("")
    command = [sys.executable, "-m", "nri_gpu", "run", *launch.arguments()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == Exit.PERMISSION
    assert f"state folder {launch.state} cannot be used" in done.stderr


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
            line = await aside(lambda: daemon.wait_logged("gpu granted"))
            assert "namespace=ml pod_name=train container_name=main pod_uid=uid-train" in line
            assert "elapsed_ms=" in line
            assert len([each for each in daemon.log().splitlines() if "gpu granted" in each]) == 1
            assert "hunter2" not in daemon.log()
            assert "SECRET" not in daemon.log()


@in_a_loop
async def test_a_stalled_log_never_blocks_a_reply(launch: Launch) -> None:
    reading, writing = os.pipe()
    environment = {"PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "nri_gpu", "run", *launch.arguments()]
    async with Listener(launch.socket) as listener:
        process = await aside(lambda: subprocess.Popen(command, env=environment, stderr=writing))
        try:
            runtime = await listener.accept(20)
            await runtime.handshake()
            pod = nri.asking("device=99")
            slowest_s = 0.0
            for _ in range(1500):  # some 300 bytes of log each: several times what a pipe holds
                began = time.monotonic()
                await runtime.create(pod, nri.container(pod))
                slowest_s = max(slowest_s, time.monotonic() - began)
            assert slowest_s < 0.5
            assert len(select.select([], [writing], [], 0)[1]) == 0  # the pipe is full indeed
            process.terminate()
            assert await aside(lambda: process.wait(ENDS_S)) == Exit.OK
        finally:
            process.kill()
            process.wait()
            os.close(reading)
            os.close(writing)


# ---- started by the runtime itself


@contextmanager
def launched(folder: Path, *, gpus: bool = True) -> Iterator[tuple[ScriptedRuntime, subprocess.Popen[bytes]]]:
    """As containerd does it: one end of a socket pair, three variables, /dev/null for the rest, no PATH."""
    ours, theirs = socket.socketpair()
    with theirs, (folder / "stderr").open("wb") as stderr:
        os.set_inheritable(theirs.fileno(), True)
        environment = {
            "NRI_PLUGIN_NAME": "nri-gpu",
            "NRI_PLUGIN_IDX": "10",
            "NRI_PLUGIN_SOCKET": str(theirs.fileno()),
        }
        # A real one has no arguments; these keep the test off the machine's own folders.
        arguments = ["run", "--state-dir", str(folder / "state"), "--stage-dir", str(folder / "drivers")]
        arguments += ["--driver-root", str(folder), *(["--gpus", str(FOUR_GPUS)] if gpus else [])]
        process = subprocess.Popen(
            [sys.executable, "-m", "nri_gpu", *arguments],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    runtime = ScriptedRuntime(ours)
    try:
        yield runtime, process
    finally:
        runtime.close()
        process.kill()
        process.wait()


@in_a_loop
async def test_launched_it_serves_and_ends_with_its_connection(folder: Path) -> None:
    with launched(folder) as (runtime, process):
        await runtime.handshake()
        await granted(runtime)
        runtime.close()
        assert await aside(lambda: process.wait(ENDS_S)) == Exit.OK
    ledger = json.loads((folder / "state" / "ledger.json").read_text())
    assert [grant["container"] for grant in ledger["grants"]] == ["main"]


@in_a_loop
async def test_launched_its_policy_comes_with_configure(folder: Path) -> None:
    with launched(folder) as (runtime, _):
        await runtime.register(config=CLOSED_POLICY)
        await runtime.synchronize()
        assert "[not-allowed]" in (await refused(runtime)).message


@in_a_loop
async def test_launched_with_a_broken_policy_it_refuses_with_the_fault(folder: Path) -> None:
    with launched(folder) as (runtime, _):
        await runtime.register(config=BAD_POLICY)
        await runtime.synchronize()
        status = await refused(runtime)
        assert "[bad-policy]" in status.message
        assert "plugin.index" in status.message


@in_a_loop
async def test_launched_a_hang_up_does_not_lose_the_policy_of_configure(folder: Path) -> None:
    """SIGHUP reads files again; the runtime's text has none, and stays."""
    with launched(folder) as (runtime, process):
        await runtime.register(config=CLOSED_POLICY)
        await runtime.synchronize()
        assert "[not-allowed]" in (await refused(runtime)).message
        process.send_signal(1)
        for _ in range(20):
            assert "[not-allowed]" in (await refused(runtime)).message
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("value", ["three", "999", "-1", "0"])
def test_launched_without_a_connection_it_says_so(folder: Path, value: str) -> None:
    command = [sys.executable, "-m", "nri_gpu", "run", "--state-dir", str(folder / "state"), "--gpus", str(FOUR_GPUS)]
    environment = {"NRI_PLUGIN_SOCKET": value}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=20, stdin=subprocess.DEVNULL
    )
    assert done.returncode == Exit.USAGE
    assert f"NRI_PLUGIN_SOCKET={value}" in done.stderr
    assert "Traceback" not in done.stderr
