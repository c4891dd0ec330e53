"""Child processes that talk in lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nri_gpu.system.child import STDERR_KEPT_MAX, LineProcess, ending, python


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
