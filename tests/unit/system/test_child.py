"""Child processes that talk in lines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from nri_gpu.system.child import STDERR_KEPT_MAX, LineProcess, ending, python, run


async def test_a_line_without_end_and_endless_noise(tmp_path: Path) -> None:
    program = tmp_path / "noisy"
    program.write_text("#!/bin/sh\nhead -c 300000 /dev/zero | tr '\\0' x >&2\nhead -c 3000000 /dev/zero\nsleep 60\n")
    program.chmod(0o755)
    process = await LineProcess.start([str(program)])
    assert await process.receive() == b""
    assert len(process.last_line()) <= STDERR_KEPT_MAX
    await process.end(0)


@pytest.mark.parametrize(
    ("status", "clause"),
    [(0, "exited with status 0"), (-11, "died of SIGSEGV"), (-99, "died of signal 99"), (None, "cannot be killed")],
)
def test_ending(status: int | None, clause: str) -> None:
    assert ending(status) == clause


def test_without_a_known_interpreter_the_running_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    assert Path(python()).samefile("/proc/self/exe")


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_a_command_that_is_given_up_as_it_starts_is_gone(turns: int) -> None:
    """Asyncio's own subprocesses wait for ever where they are cancelled before their pipes are connected."""
    running = asyncio.create_task(run(("/bin/sleep", "60"), 60.0))
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=5.0)
    assert done
    assert running.cancelled()
