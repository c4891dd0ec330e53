"""Processes as /proc has them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest

from nri_gpu.system.process import Process, process_of, user_of

NOBODY = 65534
NAMES_ITSELF = """
import ctypes, os, sys
os.seteuid(int(sys.argv[2]))
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)  # PR_SET_NAME
print("named", flush=True)
sys.stdin.read()
"""


def test_a_process_is_told_apart_until_it_ends() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = process_of(child.pid)
        assert process is not None
        assert process == process_of(child.pid)
        assert process != Process(child.pid, process.started - 1)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_of(child.pid) is None  # dead, and its number not free yet


def test_users_are_the_hosts() -> None:
    assert user_of(os.getpid()) == os.geteuid()
    assert user_of(0) is None
    assert user_of(2**30) is None


@pytest.mark.parametrize("name", [b"\xff\xfe", b"\x1cUid: 0 0 0 0", b"\nUid: 0 0 0 0", b") Z 1 2 3"])
def test_a_program_names_itself_in_any_bytes(name: bytes) -> None:
    command = [sys.executable, "-c", NAMES_ITSELF, name.hex(), str(NOBODY)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout
        assert child.stdin
        assert child.stdout.readline() == "named\n"
        process = process_of(child.pid)
        assert process is not None
        assert process.pid == child.pid
        assert process.started > 0
        assert user_of(child.pid) == NOBODY
        child.stdin.close()


LISTENS = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""
CONNECTS = """
import socket, sys
from nri_gpu.system.process import has_our_pids
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
print(has_our_pids(connection), flush=True)
sys.stdin.read()
"""
BELOW = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.parametrize(
    ("of_peer", "ours", "same"),
    [((), (), True), (BELOW, (), False), ((), BELOW, False), (BELOW, BELOW, False)],
    ids=["the same", "the peer's is below ours", "ours is below the peer's", "neither is above the other"],
)
def test_whose_pids_a_peer_has(tmp_path: Path, of_peer: Sequence[str], ours: Sequence[str], *, same: bool) -> None:
    socket = str(tmp_path / "socket")
    with ExitStack() as stack:

        def line(within: Sequence[str], program: str) -> str:
            command = [*within, sys.executable, "-c", program, socket]
            child = stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))
            assert child.stdout
            return child.stdout.readline().strip()

        assert line(of_peer, LISTENS) == "listens"
        assert line(ours, CONNECTS) == str(same)


def named(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_process_names_itself() -> None:
    show = "print(open('/proc/self/comm').read(), end='')"
    assert named(f"from nri_gpu.system.proc import name_process; name_process(); {show}") == "nri-gpu\n"
    assert (
        named(f"from nri_gpu.system.proc import name_process; name_process('kubelet'); {show}") == "nri-gpu-kubelet\n"
    )


def test_each_child_of_ours_is_found_by_name() -> None:
    package = Path(__file__).parents[3] / "nri_gpu"
    texts = {file.stem: file.read_text() for file in package.rglob("*.py")}
    programs = {name: text.partition('if __name__ == "__main__":\n')[2] for name, text in texts.items()}
    begun = {name: re.match(r' +name_process\("([a-z]{1,7})"\)\n', text) for name, text in programs.items() if text}
    assert len(begun) >= 6
    assert [name for name, found in begun.items() if found is None] == []
    parts = [found[1] for found in begun.values() if found]
    assert len(parts) == len({*parts})
