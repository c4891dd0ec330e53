"""Prepares a host below a folder with no more rights and calls than nri-gpu-prepare.service has.

python -m tests.unit.host.confined FOLDER
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Final

from nri_gpu.host.facts import look
from nri_gpu.host.kernel_view import HostFolders
from nri_gpu.host.make_nodes import actor, prepare
from tests.support.seccomp import known_groups, load_filters
from tests.support.unit_file import Unit

# linux/capability.h, linux/prctl.h
CAPABILITIES: Final = {"CAP_CHOWN": 0, "CAP_FOWNER": 3, "CAP_SYS_MODULE": 16, "CAP_MKNOD": 27}
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 23, 24, 38


def main(base: Path, path: Path) -> int:
    """In the sandbox already: prepare. Outside: go in, by becoming this program again."""
    unit = Unit.read(path)
    keep = {CAPABILITIES[name] for name in unit.words("CapabilityBoundingSet")}
    if effective() != keep:
        known_groups()
        drop_all_but(keep)
        os.execv(sys.executable, [sys.executable, "-m", "tests.unit.host.confined", str(base), str(path)])
    load_filters(unit)
    os.umask(int(unit.value("UMask"), 8))
    places = HostFolders(dev=base / "dev", proc=base / "proc", sys=base / "sys", host=base)
    report = prepare(lambda: look(places), actor(places, Path("/")), graphics=True)
    print("\n".join(map(str, report.findings)), end="")
    return bool(report.findings)


def drop_all_but(keep: set[int]) -> None:
    """Counts from the next program on."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        if number not in keep and libc.prctl(PR_CAPBSET_READ, number, 0, 0, 0) == 1:
            assert libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0


def effective() -> set[int]:
    """The capabilities that this process has."""
    match = re.search(r"^CapEff:\t(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return {number for number in range(64) if int(match[1], 16) >> number & 1}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
