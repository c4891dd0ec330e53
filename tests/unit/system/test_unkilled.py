"""A child that SIGKILL does not end, as one that hangs in the driver: a frozen cgroup of v1 makes one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from nri_gpu.system.child import KILL_S, LineProcess, run, unkilled
from tests.support.cgroup import Freezer
from tests.support.waiting import aside, wait_for

UUID = "GPU-0"


@pytest.fixture
def smi(tmp_path: Path, freezer: Freezer) -> Path:
    """A program that joins the cgroup, and hangs there."""
    return script_of(tmp_path / "nvidia-smi", f"{freezer.joining}exec sleep 60")


def script_of(program: Path, text: str) -> Path:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return program


async def hung(program: Path, freezer: Freezer) -> asyncio.Task[object]:
    """A run of the program, which has frozen in it."""
    running: asyncio.Task[object] = asyncio.create_task(run((str(program), "a"), 60.0, gpu_uuid=UUID))
    await frozen(freezer)
    return running


async def frozen(freezer: Freezer) -> None:
    await aside(wait_for, "its process", lambda: freezer.pids, 10)
    freezer.freeze()


async def cancel(running: asyncio.Task[object]) -> None:
    before = time.monotonic()
    running.cancel()
    await asyncio.wait({running}, timeout=10.0)
    assert running.cancelled()
    assert time.monotonic() - before < KILL_S / 2


async def test_a_cancelled_run_ends_at_once_and_its_process_is_reaped_when_it_ends(smi: Path, freezer: Freezer) -> None:
    await cancel(await hung(smi, freezer))
    (pid,) = freezer.pids
    assert unkilled() == ()  # most processes need a moment
    await asyncio.sleep(KILL_S)
    (found,) = unkilled()
    assert (found.program, found.gpu_uuid, found.pid) == ("nvidia-smi", UUID, pid)
    assert time.time() - 30 < found.since_s < time.time()
    freezer.thaw()
    await aside(wait_for, "it to be reaped", lambda: not Path(f"/proc/{pid}").exists(), 10)
    assert unkilled() == ()


async def test_nothing_of_its_kind_is_started_for_its_gpu_and_all_else_is(smi: Path, freezer: Freezer) -> None:
    await cancel(await hung(smi, freezer))
    (pid,) = freezer.pids
    for attempt in range(200):
        with pytest.raises(TimeoutError, match=rf"nvidia-smi {pid} still hangs in the kernel and cannot be killed"):
            await run((str(smi), f"{attempt}"), 60.0, gpu_uuid=UUID)
    assert freezer.pids == [pid]
    script_of(smi, "echo well")
    assert (await run((str(smi),), 60.0, gpu_uuid="GPU-1")).output == b"well\n"
    assert (await run(("/bin/echo", "well"), 60.0, gpu_uuid=UUID)).output == b"well\n"
    freezer.thaw()
    await aside(wait_for, "its end", lambda: not Path(f"/proc/{pid}").exists(), 10)
    assert (await run((str(smi),), 60.0, gpu_uuid=UUID)).output == b"well\n"


async def test_a_run_that_takes_too_long_is_given_up_in_time(smi: Path, freezer: Freezer) -> None:
    running = asyncio.create_task(run((str(smi),), 1.0, gpu_uuid=UUID))
    await frozen(freezer)
    done, _ = await asyncio.wait({running}, timeout=5.0)
    assert done
    assert isinstance(running.exception(), TimeoutError)


async def test_one_that_talks_in_lines_is_kept_too(smi: Path, freezer: Freezer) -> None:
    process = await LineProcess.start([str(smi)])
    await frozen(freezer)
    assert await process.end(0.0) is None
    with pytest.raises(TimeoutError, match="cannot be killed"):
        await LineProcess.start([str(smi)])
    assert [(each.program, each.gpu_uuid, each.pid) for each in unkilled()] == [("nvidia-smi", "", process.pid)]
