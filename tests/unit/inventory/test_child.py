"""The NVML process, when the driver hangs, crashes or sends something malformed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from nri_gpu.domain.errors import InventoryError
from nri_gpu.inventory.child import Deadlines, NvmlChild
from nri_gpu.inventory.report import read_report
from nri_gpu.system.line_process import STDERR_KEPT_MAX, LineProcess, ending, python
from tests.support.nvml import Act, FakeGpu, build_fake_nvml, configure, evidence

QUICK = Deadlines(call_s=1.0, slow_call_s=10.0, refresh_s=20.0, end_s=1.0)
TWO = [FakeGpu(), FakeGpu()]


def with_child(root: Path, test: Callable[[NvmlChild], Awaitable[None]], deadlines: Deadlines = QUICK) -> None:
    """Runs `test`, then closes the child."""

    async def run() -> None:
        child = NvmlChild(str(root), deadlines=deadlines)
        try:
            await test(child)
        finally:
            await child.close()

    asyncio.run(run())


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


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def eventually(fact: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not fact():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_call_that_hangs_is_named_and_killed(tmp_path: Path, before: list[int]) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetName", "hang", gpu=1)])

    async def test(child: NvmlChild) -> None:
        started = time.monotonic()
        sentence = await failure(child)
        assert sentence == "nvmlDeviceGetName of GPU 1 did not return within 1 s; the NVML process was killed"
        assert time.monotonic() - started < 8
        assert children() == before
        assert child.pid is None

    with_child(root, test)


def test_a_slow_start_of_a_gpu_has_longer(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlInitWithFlags", "hang")])
    deadlines = Deadlines(call_s=20.0, slow_call_s=2.0)

    async def test(child: NvmlChild) -> None:
        assert (await failure(child)).startswith("nvmlInit did not return within 2 s")

    with_child(root, test, deadlines)


def test_a_whole_refresh_has_a_limit_too(tmp_path: Path, before: list[int]) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetName", "hang")])

    async def test(child: NvmlChild) -> None:
        assert (await failure(child)).startswith("a whole refresh did not return within 0.5 s")
        assert children() == before

    with_child(root, test, Deadlines(refresh_s=0.5))


def test_a_crash_is_named_by_signal_and_call(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetMemoryInfo", "crash", gpu=0)])

    async def test(child: NvmlChild) -> None:
        assert await failure(child) == "the NVML process died of SIGSEGV in nvmlDeviceGetMemoryInfo of GPU 0"

    with_child(root, test)


def test_a_process_that_is_killed_between_refreshes(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO)

    async def test(child: NvmlChild) -> None:
        await child.refresh()
        assert child.pid is not None
        os.kill(child.pid, 9)
        assert await failure(child) == "the NVML process died of SIGKILL in NVML"
        assert len((await child.refresh()).gpus) == 2

    with_child(root, test)


@pytest.mark.parametrize("deed", ["hang", "crash"])
def test_the_next_refresh_starts_anew(tmp_path: Path, deed: Literal["hang", "crash"]) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetName", deed)])

    async def test(child: NvmlChild) -> None:
        await failure(child)
        configure(root, TWO)
        assert len((await child.refresh()).gpus) == 2

    with_child(root, test)


def test_a_fault_keeps_the_process(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlInitWithFlags", "fail", 9)])

    async def test(child: NvmlChild) -> None:
        await failure(child)
        pid = child.pid
        await failure(child)
        assert child.pid == pid is not None
        configure(root, TWO)
        assert len((await child.refresh()).gpus) == 2
        assert child.pid == pid

    with_child(root, test)


def test_cancelled_in_a_call_it_leaves_nothing_behind(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetName", "hang")])

    async def test(child: NvmlChild) -> None:
        task = asyncio.create_task(child.refresh())
        await asyncio.to_thread(eventually, lambda: "nvmlDeviceGetName" in evidence(root, "calls"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        configure(root, TWO)
        assert len((await child.refresh()).gpus) == 2

    with_child(root, test, Deadlines())


def test_a_relative_driver_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_fake_nvml(tmp_path / "driver", TWO)
    monkeypatch.chdir(tmp_path)

    async def test(child: NvmlChild) -> None:
        assert len((await child.refresh()).gpus) == 2

    with_child(Path("driver"), test)


def test_two_refreshes_at_once_wait_for_each_other(tmp_path: Path) -> None:
    async def test(child: NvmlChild) -> None:
        first, second = await asyncio.gather(child.refresh(), child.refresh())
        assert first.gpus == second.gpus

    with_child(build_fake_nvml(tmp_path, TWO), test)


def test_starts_are_spaced_out(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlInitWithFlags", "crash")])
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    async def run() -> None:
        child = NvmlChild(str(root), clock=lambda: 100.0, sleep=sleep)
        for _ in range(4):
            await failure(child)
        configure(root, TWO)
        await child.refresh()
        await child.refresh()
        await child.close()

    asyncio.run(run())
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_it_dies_with_its_keeper(tmp_path: Path) -> None:
    root = build_fake_nvml(tmp_path, TWO, [Act("nvmlDeviceGetName", "hang")])
    keeper = (
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
    with subprocess.Popen([sys.executable, "-c", keeper, root], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        eventually(lambda: "nvmlDeviceGetName" in evidence(root, "calls"))
        assert alive(pid)
        process.kill()
    eventually(lambda: not alive(pid))


def test_a_program_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))

    async def test(child: NvmlChild) -> None:
        assert "cannot start the NVML process" in await failure(child)

    with_child(tmp_path, test)


def test_a_program_that_says_why_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho one >&2\necho 'No module named pynvml' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def test(child: NvmlChild) -> None:
        assert await failure(child) == "the NVML process exited with status 1 in start: No module named pynvml"

    with_child(tmp_path, test)


@pytest.mark.parametrize("line", ["nonsense", "[]", "{", "[" * 100_000], ids=["no json", "no object", "half", "nested"])
def test_a_program_that_talks_nonsense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nread request\necho '{line}'\nsleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def test(child: NvmlChild) -> None:
        said = f"the NVML process sent {line[:40]!r} in start, which is not a message; another is started"
        assert (await failure(child)).replace(r"\n", "") == said
        assert child.pid is None

    with_child(tmp_path, test, Deadlines(end_s=0.1))


@pytest.mark.parametrize(
    ("said", "doing"),
    [
        ({"call": "nvmlInit", "gpu": None}, "nvmlInit"),
        ({"call": "nvmlDeviceGetName", "gpu": 2}, "nvmlDeviceGetName of GPU 2"),
        ({"call": "x" * 5000, "gpu": "y" * 5000}, "x" * 64),
        ({"call": "nvmlInit\nnri-gpu: all is well\x1b[2J", "gpu": 10**40}, "nvmlInitnrigpualliswell2J"),
        ({"call": {"a": 1}, "gpu": True}, "a call without a name"),
    ],
    ids=["of none", "of a GPU", "endless", "of several lines", "no text"],
)
def test_a_program_that_announces_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, object], doing: str
) -> None:
    program, lines = tmp_path / "python", tmp_path / "lines"
    lines.write_text(json.dumps(said) + "\n")
    program.write_text(f"#!/bin/sh\nread request\ncat {lines}\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def test(child: NvmlChild) -> None:
        assert await failure(child) == f"the NVML process exited with status 3 in {doing}"

    with_child(tmp_path, test, Deadlines(end_s=1.0))


@pytest.mark.parametrize("report", ["{}", '{"gpus": Infinity}', "3"])
def test_a_program_that_reports_nonsense_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nread request\necho '{{\"inventory\": {report}}}'\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def test(child: NvmlChild) -> None:
        for _ in range(2):
            assert "report cannot be read" in await failure(child)
            assert child.pid is None

    with_child(tmp_path, test, Deadlines(end_s=0.1))


def test_a_line_without_end_and_endless_noise(tmp_path: Path) -> None:
    program = tmp_path / "noisy"
    program.write_text("#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' x >&2\nhead -c 3000000 /dev/zero\nsleep 60\n")
    program.chmod(0o755)

    async def run() -> None:
        process = await LineProcess.start([str(program)])
        assert await process.receive() == b""
        assert len(process.last_line()) <= STDERR_KEPT_MAX
        await process.end(0)

    asyncio.run(run())


class Stuck:
    """A process inside the kernel, where no signal reaches it: it cannot be made, so it is played."""

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

    def last_line(self) -> str:
        return ""

    def kill(self) -> None:
        """In vain."""

    async def end(self, grace_s: float) -> int | None:
        return -9 if self.gone else None


def test_what_cannot_be_killed_is_not_joined_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, real_start = Stuck(), LineProcess.start

    async def start(command: Sequence[str]) -> Stuck:
        return stuck

    root = build_fake_nvml(tmp_path, TWO)
    monkeypatch.setattr(LineProcess, "start", start)

    async def test(child: NvmlChild) -> None:
        assert (await failure(child)).endswith("the NVML process cannot be killed")
        assert "process 4711 still hangs in nvmlDeviceGetName of GPU 0 and cannot be killed" in await failure(child)
        assert "process 4711 still hangs in" in await failure(child)
        stuck.gone = True
        monkeypatch.setattr(LineProcess, "start", real_start)
        assert len((await child.refresh()).gpus) == 2

    with_child(root, test)


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exited with status 0"), (-11, "died of SIGSEGV"), (-99, "died of signal 99"), (None, "cannot be killed")],
)
def test_ending_in_words(status: int | None, words: str) -> None:
    assert ending(status) == words


def test_without_a_known_interpreter_the_running_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert Path(python()).samefile("/proc/self/exe")


@pytest.mark.parametrize("report", [None, [], {}, {"gpus": 3}, {"gpus": [{}], "faults": [], "links": []}])
def test_reports_that_cannot_be_read(report: object) -> None:
    with pytest.raises(InventoryError, match="cannot be read"):
        read_report(report, 0.0)


def test_the_daemon_itself_loads_neither_pynvml_nor_ctypes() -> None:
    program = (
        "import sys\n"
        "import nri_gpu.inventory.controller, nri_gpu.inventory.child, nri_gpu.inventory.source\n"
        "print([name for name in ('pynvml', 'ctypes') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]"
