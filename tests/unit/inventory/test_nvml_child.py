"""The NVML process: what keeps it from starting, how it is confined, and when it hangs, crashes or talks nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.inventory.nvml_child import Deadlines, NvmlChild
from tests.support.cgroup import Freezer
from tests.support.driver_root import write_library
from tests.support.elf_file import ET_DYN
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, evidence
from tests.support.scripted_runtime import until
from tests.support.waiting import aside, wait_for

QUICK = Deadlines(call_s=1.0, slow_call_s=10.0, refresh_s=20.0, end_s=1.0)
TWO = [FakeGpu(), FakeGpu()]


@asynccontextmanager
async def started(root: Path, deadlines: Deadlines = QUICK, sysfs: Path = Path("/sys")) -> AsyncIterator[NvmlChild]:
    child = NvmlChild(str(root), deadlines=deadlines, sysfs=str(sysfs))
    try:
        yield child
    finally:
        await child.close()


def children() -> list[int]:
    """Our own child processes, zombies included."""
    found = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in found.read_text().split()]


@pytest.fixture(autouse=True)
def before() -> Iterator[list[int]]:
    """The children of others; after each test nothing else is left, zombies included."""
    others = children()
    yield others
    assert set(children()) <= set(others)


async def failure(child: NvmlChild) -> str:
    with pytest.raises(InventoryError) as caught:
        await child.refresh()
    return str(caught.value)


async def recovers(child: NvmlChild, root: Path) -> None:
    """Once the driver works, so does the next refresh."""
    configure(root, TWO)
    assert len((await child.refresh()).gpus) == 2


# --- a start, and a refresh -------------------------------------------------------------------------------------------


async def test_a_library_that_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "lib64/libnvidia-ml.so.1"
    path.parent.mkdir()
    of_this_machine = write_library(path, "libnvidia-ml.so.1").read_bytes()
    path.write_bytes(of_this_machine.replace(struct.pack("<H", ET_DYN), bytes(2), 1))
    async with started(tmp_path) as child:
        assert (await failure(child)).startswith(f"cannot load {path}: ")


UNSTARTED = {
    "two versions": (
        [Act("nvmlInitWithFlags", "fail", 18)],
        [],
        "580.95.05 and the loaded kernel module is 570.195.03",
    ),
    "no start": ([], ["nvmlInitWithFlags", "nvmlInit_v2"], "update the driver"),
}


@pytest.mark.parametrize(("acts", "without", "words"), UNSTARTED.values(), ids=UNSTARTED)
async def test_a_library_that_does_not_start(tmp_path: Path, acts: list[Act], without: list[str], words: str) -> None:
    root = build_fake_nvml(tmp_path / "driver", TWO, acts, without=without)
    (tmp_path / "module/nvidia").mkdir(parents=True)
    (tmp_path / "module/nvidia/version").write_text("570.195.03\n")
    async with started(root, sysfs=tmp_path) as child:
        assert words in await failure(child)


async def test_a_fault_after_the_start_shuts_nvml_too(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetCount_v2", "fail", 999)])
    async with started(root) as child:
        assert await failure(child) == "nvmlDeviceGetCount: Unknown Error (999)"
    assert evidence(root, "calls").split()[-1] == "nvmlShutdown"


async def test_the_library_sees_an_empty_environment_and_no_capabilities_and_prints_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD_OF_A_TEST", "secret")
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlInitWithFlags", "say"), Act("nvmlDeviceGetUUID", "say")])
    async with started(root) as child:
        assert len((await child.refresh()).gpus) == 2
    assert evidence(root, "environ") == ""
    status = dict(line.split(":\t", 1) for line in evidence(root, "status").splitlines())
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0000000000000000"}
    assert status["NoNewPrivs"] == "1"


async def test_nvml_is_started_and_shut_for_each_refresh_and_a_new_library_by_a_new_process(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, [FakeGpu()] * 4)
    async with started(root) as child:
        assert len((await child.refresh()).gpus) == 4
        pid = child.pid
        await recovers(child, root)
        assert child.pid == pid
        starts = [call for call in evidence(root, "calls").split() if call in ("nvmlInitWithFlags", "nvmlShutdown")]
        assert starts == ["nvmlInitWithFlags", "nvmlShutdown"] * 2
        build_fake_nvml(root, TWO, driver="590.10.01")
        assert (await child.refresh()).driver_version == "590.10.01"
        assert child.pid != pid


async def test_a_gpu_that_is_lost_is_not_asked_for_its_links(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, [FakeGpu()] * 3, [Act("nvmlDeviceGetName", "fail", 15, gpu=0)])
    async with started(root) as child:
        await child.refresh()
    assert evidence(root, "calls").splitlines().count("nvmlDeviceGetNvLinkState") == 2 * 36


# --- a driver that hangs or crashes -----------------------------------------------------------------------------------

HANGS = {
    "a call": ("nvmlDeviceGetName", QUICK, "nvmlDeviceGetName of GPU 1 did not return within 1 s; the NVML process"),
    "a call that may wake a GPU has longer": (
        "nvmlInitWithFlags",
        Deadlines(call_s=20.0, slow_call_s=2.0),
        "nvmlInit did not return within 2 s",
    ),
    "a whole refresh": ("nvmlDeviceGetName", Deadlines(refresh_s=0.5), "a whole refresh did not return within 0.5 s"),
}


@pytest.mark.parametrize(("function", "deadlines", "sentence"), HANGS.values(), ids=HANGS)
async def test_a_process_that_hangs_is_killed(
    tmp_path: Path, before: list[int], function: str, deadlines: Deadlines, sentence: str
) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act(function, "hang", gpu=-1 if "Init" in function else 1)])
    async with started(root, deadlines) as child:
        begun = time.monotonic()
        assert (await failure(child)).startswith(sentence)
        assert time.monotonic() - begun < 8
        assert (children(), child.pid) == (before, None)
        if deadlines is QUICK:
            await recovers(child, root)


async def test_a_process_that_crashes_is_named_by_signal_and_call(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetMemoryInfo", "crash", gpu=0)])
    async with started(root) as child:
        assert await failure(child) == "the NVML process died of SIGSEGV in nvmlDeviceGetMemoryInfo of GPU 0"
        await recovers(child, root)
        assert child.pid is not None
        os.kill(child.pid, 9)  # between two refreshes
        assert await failure(child) == "the NVML process died of SIGKILL in NVML"
        await recovers(child, root)


async def test_a_fault_keeps_the_process(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlInitWithFlags", "fail", 9)])
    async with started(root) as child:
        await failure(child)
        pid = child.pid
        await failure(child)
        await recovers(child, root)
        assert child.pid == pid is not None


async def test_a_refresh_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetName", "hang")])
    async with started(root, Deadlines()) as child:
        task = asyncio.create_task(child.refresh())
        await until("the call", lambda: "nvmlDeviceGetName" in evidence(root, "calls"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await recovers(child, root)


async def test_two_refreshes_at_once_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_fake_nvml(tmp_path / "driver", TWO)
    monkeypatch.chdir(tmp_path)
    async with started(Path("driver")) as child:
        first, second = await asyncio.gather(child.refresh(), child.refresh())
        assert first.gpus == second.gpus


async def test_starts_are_spaced_out(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlInitWithFlags", "crash")])
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    child = NvmlChild(str(root), clock=lambda: 100.0, sleep=sleep)
    for _ in range(4):
        await failure(child)
    await recovers(child, root)
    await child.refresh()
    await child.close()
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.8])


PARENT = """
import asyncio, sys
from nri_gpu.inventory.nvml_child import NvmlChild

async def main():
    child = NvmlChild(sys.argv[1])
    task = asyncio.create_task(child.refresh())
    while child.pid is None:
        await asyncio.sleep(0.01)
    print(child.pid, flush=True)
    await task

asyncio.run(main())
"""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetName", "hang")])
    with subprocess.Popen([sys.executable, "-c", PARENT, root], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = Path("/proc", process.stdout.readline().strip())
        wait_for("the call", lambda: "nvmlDeviceGetName" in evidence(root, "calls"), 10.0)
        assert child.exists()
        process.kill()
    wait_for("its end", lambda: not child.exists(), 10.0)


async def test_a_program_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    async with started(tmp_path) as child:
        assert "cannot start the NVML process" in await failure(child)


# --- a program that is not ours ---------------------------------------------------------------------------------------

Script = Callable[[str], None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Makes the NVML process this shell script."""

    def use(text: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{text}")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return use


def answer(line: str, then: str = "sleep 60") -> str:
    return f"read request\nprintf '%s\\n' '{line}'\n{then}\n"


def announce(call: object, gpu: object) -> str:
    """A call, after which it ends."""
    return answer(json.dumps({"call": call, "gpu": gpu}), "exit 3")


NO_MESSAGE = "sent {!r} in start, which is not a message; a new process is started"
ENDED = "exited with status 3 in {}"
STRANGE = {
    "says why it ended": (
        "echo one >&2\necho 'No module named pynvml' >&2\nexit 1\n",
        "exited with status 1 in start: No module named pynvml",
    ),
    "no JSON": (answer("nonsense"), NO_MESSAGE.format("nonsense")),
    "no object": (answer("[]"), NO_MESSAGE.format("[]")),
    "half an object": (answer("{"), NO_MESSAGE.format("{")),
    "deeply nested": (answer("[" * 100_000), NO_MESSAGE.format("[" * 40)),
    "a call of no GPU": (announce("nvmlInit", None), ENDED.format("nvmlInit")),
    "a call of a GPU": (announce("nvmlDeviceGetName", 2), ENDED.format("nvmlDeviceGetName of GPU 2")),
    "an endless call": (announce("x" * 5000, "y" * 5000), ENDED.format("x" * 64)),
    "a call of several lines": (
        announce("nvmlInit\nnri-gpu: all is well\x1b[2J", 10**40),
        ENDED.format("nvmlInitnrigpualliswell2J"),
    ),
    "a call that is no text": (announce({"a": 1}, gpu=True), ENDED.format("a call without a name")),
}


@pytest.mark.parametrize(("text", "said"), STRANGE.values(), ids=STRANGE)
async def test_a_strange_program(tmp_path: Path, script: Script, text: str, said: str) -> None:
    script(text)
    async with started(tmp_path, Deadlines(end_s=0.1)) as child:
        assert (await failure(child)).replace(r"\n", "") == f"the NVML process {said}"
        assert child.pid is None


@pytest.mark.parametrize("report", ["{}", '{"gpus": Infinity}', "3"])
async def test_a_program_whose_report_cannot_be_read_is_replaced(tmp_path: Path, script: Script, report: str) -> None:
    script(answer(f'{{"inventory": {report}}}', "exec sleep 60"))
    async with started(tmp_path, Deadlines(end_s=0.1)) as child:
        for _ in range(2):
            assert "report cannot be read" in await failure(child)
            assert child.pid is None


async def test_no_second_process_while_the_first_cannot_be_killed(
    tmp_path: Path, script: Script, freezer: Freezer
) -> None:
    root = build_fake_nvml(tmp_path / "root", TWO)
    real = shlex.quote(sys.executable)
    script(f"""{freezer.joining}echo '{{"call": "nvmlDeviceGetName", "gpu": 0}}'\nexec sleep 60\n""")
    async with started(root, Deadlines(call_s=0.5, slow_call_s=5.0)) as child:
        failing = asyncio.create_task(failure(child))
        await aside(wait_for, "the process", lambda: freezer.pids, 10)
        await asyncio.sleep(0.2)
        freezer.freeze()
        assert (await failing).endswith("the NVML process cannot be killed")
        for _ in range(2):
            fault = await failure(child)
            assert "nvmlDeviceGetName of GPU 0 did not return: " in fault
            assert f"{freezer.pids[0]} still hangs in the kernel and cannot be killed" in fault
        freezer.thaw()
        await aside(wait_for, "its end", lambda: not freezer.pids, 10)
        script(f'exec {real} "$@"\n')
        await recovers(child, root)
