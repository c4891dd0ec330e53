"""The NVML process, when the driver hangs or crashes, or the process sends something malformed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.inventory.child import Deadlines, NvmlChild
from nri_gpu.system.line_process import LineProcess
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, evidence

QUICK = Deadlines(call_s=1.0, slow_call_s=10.0, refresh_s=20.0, end_s=1.0)
TWO = [FakeGpu(), FakeGpu()]


@asynccontextmanager
async def started(root: Path, deadlines: Deadlines = QUICK) -> AsyncIterator[NvmlChild]:
    child = NvmlChild(str(root), deadlines=deadlines)
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
    assert children() == others


async def failure(child: NvmlChild) -> str:
    with pytest.raises(InventoryError) as caught:
        await child.refresh()
    return str(caught.value)


async def recovers(child: NvmlChild, root: Path) -> None:
    """Once the driver works, so does the next refresh."""
    configure(root, TWO)
    assert len((await child.refresh()).gpus) == 2


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def eventually(fact: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.01)


HANGS = {
    "a call": (
        "nvmlDeviceGetName",
        QUICK,
        "nvmlDeviceGetName of GPU 1 did not return within 1 s; the NVML process",
    ),
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
        await asyncio.to_thread(eventually, lambda: "nvmlDeviceGetName" in evidence(root, "calls"))
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


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetName", "hang")])
    parent = (
        "import asyncio, sys\n"
        "from nri_gpu.inventory.child import NvmlChild\n"
        "async def main():\n"
        "    child = NvmlChild(sys.argv[1])\n"
        "    task = asyncio.create_task(child.refresh())\n"
        "    while child.pid is None:\n"
        "        await asyncio.sleep(0.01)\n"
        "    print(child.pid, flush=True)\n"
        "    await task\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent, root], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        eventually(lambda: "nvmlDeviceGetName" in evidence(root, "calls"))
        assert alive(pid)
        process.kill()
    eventually(lambda: not alive(pid))


async def test_a_program_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    async with started(tmp_path) as child:
        assert "cannot start the NVML process" in await failure(child)


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


async def test_a_program_that_says_why_it_ended(tmp_path: Path, script: Script) -> None:
    script("echo one >&2\necho 'No module named pynvml' >&2\nexit 1\n")
    async with started(tmp_path) as child:
        assert await failure(child) == "the NVML process exited with status 1 in start: No module named pynvml"


@pytest.mark.parametrize("line", ["nonsense", "[]", "{", "[" * 100_000], ids=["no json", "no object", "half", "nested"])
async def test_a_program_that_sends_no_message(tmp_path: Path, script: Script, line: str) -> None:
    script(f"read request\necho '{line}'\nsleep 60\n")
    async with started(tmp_path, Deadlines(end_s=0.1)) as child:
        said = f"the NVML process sent {line[:40]!r} in start, which is not a message; another is started"
        assert (await failure(child)).replace(r"\n", "") == said
        assert child.pid is None


@pytest.mark.parametrize(
    ("message", "doing"),
    [
        ({"call": "nvmlInit", "gpu": None}, "nvmlInit"),
        ({"call": "nvmlDeviceGetName", "gpu": 2}, "nvmlDeviceGetName of GPU 2"),
        ({"call": "x" * 5000, "gpu": "y" * 5000}, "x" * 64),
        ({"call": "nvmlInit\nnri-gpu: all is well\x1b[2J", "gpu": 10**40}, "nvmlInitnrigpualliswell2J"),
        ({"call": {"a": 1}, "gpu": True}, "a call without a name"),
    ],
    ids=["of none", "of a GPU", "endless", "of several lines", "no text"],
)
async def test_a_program_that_announces_malformed_calls(
    tmp_path: Path, script: Script, message: dict[str, object], doing: str
) -> None:
    (tmp_path / "lines").write_text(json.dumps(message) + "\n")
    script(f"read request\ncat {tmp_path / 'lines'}\nexit 3\n")
    async with started(tmp_path) as child:
        assert await failure(child) == f"the NVML process exited with status 3 in {doing}"


@pytest.mark.parametrize("report", ["{}", '{"gpus": Infinity}', "3"])
async def test_a_program_whose_report_cannot_be_read_is_replaced(tmp_path: Path, script: Script, report: str) -> None:
    script(f"read request\necho '{{\"inventory\": {report}}}'\nexec sleep 60\n")
    async with started(tmp_path, Deadlines(end_s=0.1)) as child:
        for _ in range(2):
            assert "report cannot be read" in await failure(child)
            assert child.pid is None


class Stuck:
    """A process inside the kernel, where no signal reaches it. Such a one cannot be made."""

    pid = 4711
    gone = False
    said = False

    async def send(self, line: bytes) -> None:
        """Lost."""

    async def receive(self) -> bytes:
        if self.said:
            await asyncio.sleep(60)
        self.said = True
        return b'{"call": "nvmlDeviceGetName", "gpu": 0}'

    def kill(self) -> None:
        """In vain."""

    async def end(self, grace_s: float) -> int | None:
        return -9 if self.gone else None


async def test_beside_a_process_that_cannot_be_killed_no_other_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, real_start = Stuck(), LineProcess.start

    async def start(command: Sequence[str]) -> Stuck:
        return stuck

    root = build_fake_nvml(tmp_path, TWO)
    monkeypatch.setattr(LineProcess, "start", start)
    async with started(root) as child:
        assert (await failure(child)).endswith("the NVML process cannot be killed")
        for _ in range(2):
            assert "process 4711 still hangs in nvmlDeviceGetName of GPU 0 and cannot be killed" in await failure(child)
        stuck.gone = True
        monkeypatch.setattr(LineProcess, "start", real_start)
        await recovers(child, root)


def test_the_daemon_itself_loads_neither_pynvml_nor_ctypes() -> None:
    program = (
        "import sys\n"
        "import nri_gpu.inventory.controller, nri_gpu.inventory.child, nri_gpu.inventory.source\n"
        "print([name for name in ('pynvml', 'ctypes') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]"
