"""Processes as /proc has them."""

from __future__ import annotations

import os
import subprocess

from nri_gpu.system.process import Process, process_of, user_of


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
