"""`nri-gpu status --watch` beside a real daemon: in a pipe, for programs, and live in a real terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shlex
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import IO

import pytest

from nri_gpu.cli.ask_daemon import TIMEOUT_S, daemon_status
from nri_gpu.cli.watch import ASK_S
from nri_gpu.domain.errors import Exit
from tests.support.daemon import FOUR_GPUS, Launch, NriGpu
from tests.support.schemas import conforming
from tests.support.tmux import Terminal
from tests.support.waiting import wait_for

PATIENCE_S = 40.0
LEAVE = b"\x1b[?25h\x1b[?1049l"  # the cursor again, and the screen of before
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
        terminal.wait_for("3 free, 1 unavailable", "the last changes:", "q ends, / filters, arrows,")
        assert "\x1b[1m\x1b[31m" in terminal.screen(styled=True)  # what is wrong is bold and red
        terminal.resize(40, 12)
        terminal.wait_for("3 free, 1 unavailable", "lines 1 to 11 of ")
        terminal.resize(100, 40)
        terminal.wait_for("the last changes:", "shows remap-failed")
        daemon.terminate()
        terminal.wait_for("below is its last answer")
        daemon.start()
        terminal.wait_for("the daemon answers again")
        terminal.press("C-c")
        assert "GPU  MODEL" not in terminal.wait_for(f"ended with {Exit.OK}")  # the screen is what it was


def test_keys_scroll_filter_and_end_it(daemon: NriGpu, folder: Path) -> None:
    worsen(daemon)
    with Terminal(folder, command(daemon), columns=60, rows=10) as terminal:
        top = terminal.wait_for("4 GPUs: 0 held, 3 free, 1 unavailable", "lines 1 to 9 of ")
        terminal.press("Down")
        terminal.wait_for("lines 2 to 10 of ")
        terminal.press("Up")
        terminal.wait_for("lines 1 to 9 of ")
        terminal.press("NPage")
        terminal.wait_for("lines 10 to 18 of ")
        terminal.press("End")
        assert "4 GPUs: 0 held" not in terminal.wait_for("is bad")  # the oldest change is the last line
        terminal.press("PPage")
        terminal.press("Home")
        assert terminal.wait_for("lines 1 to 9 of ").splitlines()[0] == top.splitlines()[0]
        terminal.resize(100, 40)
        terminal.wait_for("the last changes:", "0    A100", "3    A100")
        terminal.write("/bad")
        terminal.wait_for("/bad  (Enter keeps it, Esc ends it)")
        terminal.press("Enter")
        filtered = terminal.wait_for("filtered by 'bad', Esc ends that; q ends")
        assert ("0    A100" in filtered, "3    A100" in filtered) == (True, False)
        assert "4 GPUs: 0 held" in filtered
        terminal.write("/q")  # a letter of the words, and no end
        terminal.wait_for("/q  (Enter", "no row has it")
        terminal.press("Escape")
        terminal.wait_for("3    A100", "q ends, / filters")
        terminal.write("q")
        assert "GPU  MODEL" not in terminal.wait_for(f"ended with {Exit.OK}")


def test_the_terminal_is_as_it_was_while_it_is_stopped(daemon: NriGpu, folder: Path) -> None:
    with Terminal(folder, ["bash", "--norc", "-i"], columns=80, rows=24) as terminal:
        terminal.write(f"{shlex.join(command(daemon))}\n")
        terminal.wait_for("4 GPUs: 0 held", "q ends")
        terminal.press("C-z")
        assert "4 GPUs" not in terminal.wait_for("Stopped")
        terminal.write("echo is there\n")
        terminal.wait_for("\nis there")
        terminal.write("fg\n")
        terminal.wait_for("4 GPUs: 0 held", "q ends")
        terminal.write("q")
        terminal.wait_for("is there")
        terminal.write("echo ended with $?\n")
        terminal.wait_for("\nended with 0")


@contextmanager
def on_pty(*arguments: str) -> Iterator[tuple[Popen[bytes], int]]:
    """A command that leads a session on a terminal, and the terminal's other side."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}

    def lead() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with Popen(
        arguments, stdin=follower, stdout=follower, stderr=follower, env=environment, preexec_fn=lead
    ) as process:
        try:
            yield process, leader
        finally:
            process.kill()
            os.close(follower)
            os.close(leader)


def read_until(leader: int, words: bytes) -> bytes:
    said = b""
    began = time.monotonic()
    while words not in said:
        ready, _, _ = select.select([leader], [], [], 1.0)
        said += os.read(leader, 1 << 16) if ready else b""
        assert time.monotonic() - began < PATIENCE_S, said
    return said


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "q", "the parent"])
def test_the_terminal_is_as_it_was_whatever_ends_it(daemon: NriGpu, folder: Path, end: str) -> None:
    inner = f"echo $$ >{folder}/parent; {shlex.join(command(daemon))}; true"
    outer = f"trap : TERM INT HUP QUIT; sh -c {shlex.quote(inner)}; echo shell is there; read forever"
    with on_pty("sh", "-c", outer) as (_, leader):
        before = termios.tcgetattr(leader)
        assert LEAVE not in read_until(leader, b"q ends")
        assert not termios.tcgetattr(leader)[3] & (termios.ICANON | termios.ECHO)
        parent = int((folder / "parent").read_text())
        (watcher,) = children_of(parent)
        match end:
            case "q":
                os.write(leader, b"q")
            case "the parent":
                os.kill(parent, signal.SIGKILL)
            case _:
                os.kill(watcher, signal.Signals[end])
        read_until(leader, LEAVE)
        wait_for("its end", lambda: not Path(f"/proc/{watcher}/fd/0").exists(), PATIENCE_S)
        assert termios.tcgetattr(leader) == before


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_without_keys_it_says_how_to_end_it(daemon: NriGpu, folder: Path) -> None:
    with Terminal(folder, ["sh", "-c", f"{shlex.join(command(daemon))} </dev/null"], columns=80, rows=24) as terminal:
        terminal.wait_for("4 GPUs: 0 held", "no key works but Ctrl-C")
        terminal.press("C-c")
        terminal.wait_for("ended with ")


def test_a_daemon_that_hangs_stops_no_key(daemon: NriGpu, folder: Path) -> None:
    with Terminal(folder, command(daemon), columns=60, rows=10) as terminal:
        terminal.wait_for("lines 1 to 9 of ")
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            time.sleep(2 * ASK_S)  # so that it was asked, and has not answered
            began = time.monotonic()
            terminal.press("Down")
            terminal.wait_for("lines 2 to 10 of ")
            terminal.write("q")
            terminal.wait_for(f"ended with {Exit.OK}")
            assert time.monotonic() - began < TIMEOUT_S / 2
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
