"""Whose a file of the overflow user is, in real user namespaces: its host's, or that of this machine's own nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from msgspec import Struct

from tests.support.user_namespace import LXC, OF_THE_HOST, SMALL, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away, and write such a map")
JUDGE: Final = """
import sys
from pathlib import Path
from nri_gpu.system.storage import why_untrusted
print(why_untrusted(Path(sys.argv[1]).stat(), Path(sys.argv[1])))
"""
SANDBOX: Final = 'mount -o remount,bind,ro "$1"; shift; exec "$@"'
BIND: Final = "mount --bind given driver; mount -o remount,bind,ro driver"


class Case(Struct, frozen=True):
    """A file, and the machine that has it. believed: containers get it. mounts: what the machine does before."""

    believed: bool
    ids: str = LXC
    mounts: str = "mount --bind given driver"
    owner: int = OF_THE_HOST
    mode: int = 0o644
    own_init: bool = True


CASES: Final = {
    "an owner that nobody here can be": Case(True, SMALL),
    "that user has an id here, too": Case(False),
    "it has, and the mount is read-only": Case(True, mounts=BIND),
    "the group may write": Case(False, SMALL, mode=0o664),
    "others may write, and the mount is read-only": Case(False, mounts=BIND, mode=0o646),
    "a user of this machine, and the mount is read-only": Case(False, mounts=BIND, owner=1000),
    "read-only in a unit's sandbox alone": Case(
        False, mounts=f'mount --bind given driver; set -- unshare --mount sh -ec \'{SANDBOX}\' sh "$PWD/driver" "$@"'
    ),
    "process 1 is not this machine's": Case(True, mounts=BIND, own_init=False),
    "process 1 is not this machine's, and everything is read-only": Case(
        False, mounts=f"{BIND}; mount -o remount,bind,ro /", own_init=False
    ),
    "process 1 is hidden": Case(
        False,
        mounts=f'{BIND}; mount -t proc -o hidepid=4 proc /proc; set -- setpriv --bounding-set=-sys_ptrace "$@"',
    ),
    "a blank in the path": Case(
        True, mounts="mkdir 'a b'; mount --bind given 'a b'; mount -o remount,bind,ro 'a b'; mount --rbind 'a b' driver"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_file_of_the_overflow_user(tmp_path: Path, case: Case) -> None:
    for name in ("given", "driver"):
        (tmp_path / name).mkdir()
    file = tmp_path / "given/libcuda.so.1"
    file.touch()
    file.chmod(case.mode)
    os.chown(file, case.owner, case.owner)
    judge = (sys.executable, "-c", JUDGE, str(tmp_path / "driver/libcuda.so.1"))
    script = f'set -e; cd "$1"; shift; {case.mounts}; cd "$OLDPWD"; "$@"; exit $?'
    done = run("sh", "-c", script, "sh", str(tmp_path), *judge, ids=case.ids, own_init=case.own_init)
    shown = case.owner if case.owner != OF_THE_HOST else 65534
    why = "" if case.believed else f"owner {shown}, mode {case.mode:04o}: users other than root can change it"
    assert (done.stdout.strip(), done.stderr, done.returncode) == (why, "", 0)


def test_the_hosts_own_nobody_is_a_user(tmp_path: Path) -> None:
    """Outside of user namespaces, on a mount that is read-only."""
    file = tmp_path / "libcuda.so.1"
    file.touch(0o644)
    os.chown(file, 65534, 65534)
    script = 'set -e; mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"; shift; exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, "-c", JUDGE, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("owner 65534, mode 0644")
