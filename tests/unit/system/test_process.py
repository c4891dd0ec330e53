"""Processes as /proc has them."""

from __future__ import annotations

import os
import subprocess
import sys

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
