"""Capabilities that a process sets aside and that its children have again, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from nri_gpu.system.capabilities import CHOWN, DAC_READ_SEARCH, SYS_ADMIN, SYS_PTRACE

HANDED_ON = (1 << SYS_PTRACE) | (1 << DAC_READ_SEARCH)
PROGRAM = """
import subprocess
from nri_gpu.system.capabilities import CHOWN, DAC_READ_SEARCH, SYS_ADMIN, SYS_PTRACE, permits, set_aside
set_aside([CHOWN], hand_on=[SYS_PTRACE, DAC_READ_SEARCH])
print(open("/proc/self/status").read(), flush=True)
subprocess.run(["/bin/cat", "/proc/self/status"], check=True)
print("admin:", permits(SYS_ADMIN))
"""


def sets(*confined: str) -> tuple[Mapping[str, int], Mapping[str, int], bool]:
    """The sets of a process that set them aside and of its child, and whether it is permitted SYS_ADMIN."""
    command = [*confined, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    found = [line.split(":") for line in done.stdout.splitlines() if line.startswith("Cap")]
    own, child = ({name: int(value, 16) for name, value in part} for part in (found[:5], found[5:]))
    return own, child, "admin: True" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities")
@pytest.mark.parametrize("confined", [(), ("setpriv", "--no-new-privs")], ids=["free", "without new privileges"])
def test_the_process_does_without_them_and_its_child_has_them(confined: tuple[str, ...]) -> None:
    own, child, admin = sets(*confined)
    assert own["CapEff"] == 1 << CHOWN
    assert child["CapEff"] == own["CapPrm"]
    assert child["CapEff"] & HANDED_ON == HANDED_ON
    assert admin == bool(own["CapPrm"] & (1 << SYS_ADMIN))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give another user capabilities")
def test_a_child_of_another_user_has_what_is_handed_on_and_no_more() -> None:
    """As in a unit with User= and AmbientCapabilities=."""
    confined = (
        *("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
        *("--inh-caps", "+sys_ptrace,+dac_read_search,+kill", "--ambient-caps", "+sys_ptrace,+dac_read_search,+kill"),
    )
    own, child, admin = sets(*confined)
    assert own["CapEff"] == 0
    assert child["CapEff"] == HANDED_ON
    assert not admin
