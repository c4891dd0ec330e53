"""A child that SIGKILL does not end, as one that hangs in the driver: a frozen cgroup of v1 makes one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_gpu.system.child import KILL_S, LineProcess, run, unkilled
from tests.support.cgroup import processes
from tests.support.waiting import aside, wait_for

FREEZER = Path("/sys/fs/cgroup/freezer")
UUID = "GPU-0"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not (FREEZER / "tasks").exists(), reason="needs root and the freezer of cgroup v1"
)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Whose processes freeze with `freeze`, and live until the test ends."""
    folder = FREEZER / f"nri-gpu-test-child-{os.getpid()}"
    folder.mkdir()
    yield folder
    thaw(folder)
    wait_for("the frozen processes to end", lambda: not (folder / "cgroup.procs").read_text(), 10)
    folder.rmdir()


def thaw(folder: Path) -> None:
    (folder / "freezer.state").write_text("THAWED")


def freeze(folder: Path) -> None:
    (folder / "freezer.state").write_text("FROZEN")


@pytest.fixture
def smi(tmp_path: Path, cgroup: Path) -> Path:
    """A program that joins the cgroup, and hangs there."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho $$ > {cgroup}/cgroup.procs\nexec sleep 60\n")
    program.chmod(0o755)
    return program


async def hung(program: Path, cgroup: Path) -> asyncio.Task[object]:
    """A run of the program, which has frozen in it."""
    running = asyncio.create_task(run((str(program), "a"), 60.0, gpu_uuid=UUID))
    await aside(wait_for, "its process", lambda: processes(cgroup), 10)
    freeze(cgroup)
    return running


async def cancel(running: asyncio.Task[object]) -> None:
    before = time.monotonic()
    running.cancel()
    await asyncio.wait({running}, timeout=10.0)
    assert running.cancelled()
    assert time.monotonic() - before < KILL_S / 2


async def test_a_cancelled_run_ends_at_once_and_its_process_is_reaped_when_it_ends(smi: Path, cgroup: Path) -> None:
    await cancel(await hung(smi, cgroup))
    (pid,) = processes(cgroup)
    assert unkilled() == ()  # most processes need a moment
    await asyncio.sleep(KILL_S)
    (found,) = unkilled()
    assert (found.program, found.gpu_uuid, found.pid) == ("nvidia-smi", UUID, pid)
    assert time.time() - 30 < found.since_s < time.time()
    thaw(cgroup)
    await aside(wait_for, "it to be reaped", lambda: not Path(f"/proc/{pid}").exists(), 10)
    assert unkilled() == ()


async def test_nothing_of_its_kind_is_started_for_its_gpu_and_all_else_is(smi: Path, cgroup: Path) -> None:
    await cancel(await hung(smi, cgroup))
    (pid,) = processes(cgroup)
    for attempt in range(200):
        with pytest.raises(TimeoutError, match=rf"nvidia-smi {pid} still hangs in the kernel and cannot be killed"):
            await run((str(smi), f"{attempt}"), 60.0, gpu_uuid=UUID)
    assert processes(cgroup) == [pid]
    smi.write_text("#!/bin/sh\necho well\n")
    assert (await run((str(smi),), 60.0, gpu_uuid="GPU-1")).output == b"well\n"
    assert (await run(("/bin/echo", "well"), 60.0, gpu_uuid=UUID)).output == b"well\n"
    thaw(cgroup)
    await aside(wait_for, "its end", lambda: not Path(f"/proc/{pid}").exists(), 10)
    assert (await run((str(smi),), 60.0, gpu_uuid=UUID)).output == b"well\n"


async def test_a_run_that_takes_too_long_is_given_up_in_time(smi: Path, cgroup: Path) -> None:
    running = asyncio.create_task(run((str(smi),), 1.0, gpu_uuid=UUID))
    await aside(wait_for, "its process", lambda: processes(cgroup), 10)
    freeze(cgroup)
    done, _ = await asyncio.wait({running}, timeout=5.0)
    assert done
    assert isinstance(running.exception(), TimeoutError)


async def test_one_that_talks_in_lines_is_kept_too(smi: Path, cgroup: Path) -> None:
    process = await LineProcess.start([str(smi)])
    await aside(wait_for, "its process", lambda: processes(cgroup), 10)
    freeze(cgroup)
    assert await process.end(0.0) is None
    with pytest.raises(TimeoutError, match="cannot be killed"):
        await LineProcess.start([str(smi)])
    assert [(each.program, each.gpu_uuid, each.pid) for each in unkilled()] == [("nvidia-smi", "", process.pid)]
