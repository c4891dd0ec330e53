"""`nri-gpu status --watch` beside a real daemon: in a pipe, for programs, and live in a real terminal."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO

import pytest

from nri_gpu.cli.ask_daemon import daemon_status
from nri_gpu.domain.errors import Exit
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.schemas import conforming
from tests.support.tmux import Terminal
from tests.support.waiting import wait_for

PATIENCE_S = 40.0
TROUBLE = '[[gpu]]\nsigns = "remap-failed"\n'


@pytest.fixture
def daemon(folder: Path) -> Iterator[NriGpu]:
    """Of four simulated GPUs, without a runtime."""
    topology = folder / "node.toml"
    topology.write_text(FOUR_GPUS.read_text())
    launch = Launch(folder / "d", socket=folder / "none.sock", topology=topology)
    with NriGpu(launch) as started:
        state = launch.state
        wait_for("the daemon to know its GPUs", lambda: bool((known := daemon_status(state)) and known.gpus), 20)
        yield started


def worsen(daemon: NriGpu) -> None:
    assert daemon.launch.topology
    daemon.launch.topology.write_text(FOUR_GPUS.read_text().replace("[[gpu]]\n", TROUBLE, 1))
    daemon.hang_up()


def command(daemon: NriGpu, *options: str) -> list[str]:
    return [sys.executable, "-m", "nri_gpu", "status", "--watch", "--state-dir", str(daemon.launch.state), *options]


@contextmanager
def watching(daemon: NriGpu, *options: str) -> Iterator[tuple[Popen[str], IO[str]]]:
    with Popen(command(daemon, *options), stdout=PIPE, stderr=PIPE, text=True) as process:
        patience = threading.Timer(PATIENCE_S, process.kill)
        patience.start()
        try:
            assert process.stdout
            yield process, process.stdout
        finally:
            patience.cancel()
            process.kill()


def line_with(stream: IO[str], words: str) -> str:
    lines: list[str] = []
    for line in stream:
        if words in line:
            return line
        lines.append(line)
    raise AssertionError(f"no line with {words!r}: {lines}")


def test_a_pipe_gets_a_line_for_each_change(daemon: NriGpu) -> None:
    with watching(daemon) as (process, said):
        line_with(said, "GPU  MODEL")
        worsen(daemon)
        assert line_with(said, "shows remap-failed").startswith("20")
        line_with(said, "GPU 0 (GPU-0a100004-0000-4000-8000-000000000000) is bad, because of: a row of its memory")
        daemon.terminate()
        line_with(said, "no answer from the daemon")
        daemon.start()
        line_with(said, "the daemon answers again")
        process.terminate()
        assert process.wait(10) == Exit.OK
        assert process.stderr
        assert process.stderr.read() == ""


def test_for_programs_a_document_a_line(daemon: NriGpu) -> None:
    with watching(daemon, "-o", "json") as (process, said):
        first = json.loads(said.readline())
        assert (first["changes"], len(first["status"]["gpus"])) == ([], 4)
        worsen(daemon)
        changed = json.loads(line_with(said, "remap-failed"))
        assert changed["status"]["gpus"][0]["health"]["signs"] == ["remap-failed"]
        daemon.terminate()
        lost = json.loads(line_with(said, "no answer from the daemon"))
        assert (lost["status"], lost["changes"][-1]["kind"]) == (None, "daemon")
        for each in (first, changed, lost):
            conforming(each)
        said.close()  # nobody reads any more
        daemon.start()
        assert process.wait(PATIENCE_S) == Exit.OK


def test_live_in_a_real_terminal(daemon: NriGpu, folder: Path) -> None:
    with Terminal(folder, command(daemon), columns=80, rows=24) as terminal:
        screen = terminal.wait_for("4 GPUs: 0 held, 4 free, 0 unavailable", "not connected to the runtime")
        assert all(len(line) <= 80 for line in screen.splitlines())
        worsen(daemon)
        terminal.wait_for("3 free, 1 unavailable", "the last changes:", "shows remap-failed")
        assert "\x1b[1m\x1b[31m" in terminal.screen(styled=True)  # what is wrong is bold and red
        terminal.resize(40, 12)
        terminal.wait_for("3 free, 1 unavailable", "more lines: make the window")
        terminal.resize(100, 40)
        terminal.wait_for("the last changes:")
        daemon.terminate()
        terminal.wait_for("below is its last answer")
        daemon.start()
        terminal.wait_for("the daemon answers again")
        terminal.press("C-c")
        assert "GPU  MODEL" not in terminal.wait_for(f"ended with {Exit.OK}")  # the screen is what it was
