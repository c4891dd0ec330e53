"""What takes long says so on a terminal, and leaves nothing there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nri_gpu.cli.working import working
from tests.support.tmux import Terminal

SCRIPT = """
from nri_gpu.cli.working import working
with working("doing it", {share}, wait_s=0.0):
    open({until!r}).read()
print("done")
"""


@pytest.mark.parametrize(("share", "shown"), [("None", "0:00:0"), ("lambda: 0.25", "25%")])
def test_work_is_shown_until_it_is_done(folder: Path, share: str, shown: str) -> None:
    until = folder / "until"
    os.mkfifo(until)
    script = SCRIPT.format(share=share, until=str(until))
    with Terminal(folder, [sys.executable, "-c", script], columns=80, rows=10) as terminal:
        terminal.wait_for("doing it", shown)
        until.write_text("now")
        assert "doing it" not in terminal.wait_for("done", "ended with 0")


def test_a_pipe_sees_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with working("doing it", wait_s=0.0):
        pass
    assert capsys.readouterr() == ("", "")


def test_replay_shows_how_far_it_is(folder: Path) -> None:
    """Of a log that comes slowly: a pipe behind 300 lines that are no records."""
    log, rest = folder / "audit.1.jsonl", folder / "audit.jsonl"
    log.write_text("{}\n" * 300)
    os.mkfifo(rest)
    command = [sys.executable, "-m", "nri_gpu", "replay", str(log), str(rest)]
    with Terminal(folder, command, columns=100, rows=20) as terminal:
        terminal.wait_for("deciding again", "100%")
        rest.write_text("[]\n")
        assert "deciding again" not in terminal.wait_for("0 decisions", "ended with 1")
