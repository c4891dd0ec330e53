"""Runs a program as a unit's sandbox would, where no systemd runs: the unit's own lines, applied by hand.

    python -m tests.support.sandbox --rw DIR ... --keep DIR ... -- PROGRAM ARGUMENT ...

What systemd does through cgroups (DevicePolicy=, MemoryMax=, IPAddressDeny=) is not done here, nor is what only its
own bookkeeping can do (Restart=, WatchdogSec=). The process keeps its pid.
"""

import argparse
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tests.support.seccomp import known_groups, load_filters
from tests.support.unit_file import OURS, Unit

# linux/sched.h, linux/prctl.h, linux/mount.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 23, 24, 38
CAPABILITIES: Final = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19}  # linux/capability.h; those that units keep
NR_MOUNT_SETATTR: Final = 442  # the same on every architecture
MOUNT_ATTR_RDONLY: Final = 0x1
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ALWAYS_WRITABLE: Final = (Path("/dev"), Path("/proc"), Path("/sys"))
PROJECT: Final = Path(__file__).resolve().parents[2]

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def command(
    program: Sequence[str], *, rw: Iterable[Path] = (), keep: Iterable[Path] = (), unit: Path = OURS
) -> list[str]:
    """The command line that runs `program` in the sandbox of a unit of ours.

    rw: what RuntimeDirectory= and StateDirectory= would be; keep: what must be seen although it lies below /tmp or a
    home. Both must exist. The interpreter and the project are kept anyway.
    """
    places = [*(f"--rw={path}" for path in rw), *(f"--keep={path}" for path in keep)]
    return [sys.executable, "-m", "tests.support.sandbox", f"--unit={unit}", *places, "--", *program]


def main() -> None:
    """Never returns: becomes the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rw", type=Path, action="append", default=[])
    parser.add_argument("--keep", type=Path, action="append", default=[])
    parser.add_argument("--unit", type=Path, default=OURS)
    parser.add_argument("program", nargs="+")
    options = parser.parse_args()
    unit = Unit.read(options.unit)
    known_groups()
    namespaces = CLONE_NEWNS | (CLONE_NEWUTS if unit.on("ProtectHostname") else 0)
    namespaces |= (CLONE_NEWNET if unit.on("PrivateNetwork") else 0) | (CLONE_NEWIPC if unit.on("PrivateIPC") else 0)
    _checked(_libc.unshare(namespaces))
    _mount("--make-rslave", "/")
    _files(unit, options.rw, {*options.keep, *options.rw, PROJECT, Path(sys.prefix), Path(sys.base_prefix)})
    _rights(unit)
    os.environ.pop("PYTHONPATH", None)  # it was for this module only
    load_filters(unit)
    os.execv(options.program[0], options.program)


def _files(unit: Unit, rw: Sequence[Path], keep: set[Path]) -> None:
    writable = [*ALWAYS_WRITABLE, *rw]
    hidden = [Path(path.lstrip("-")) for path in unit.words("InaccessiblePaths")]
    if unit.on("ProtectKernelModules"):
        hidden.append(Path("/usr/lib/modules"))
    emptied = [Path("/home"), Path("/root"), Path("/run/user")] if unit.on("ProtectHome") else []
    if unit.on("PrivateTmp"):
        private = [Path("/tmp"), Path("/var/tmp")]
        emptied, writable = emptied + private, writable + private
    _replace([*emptied, *hidden], keep)
    hidden_processes = unit.value("ProtectProc").replace("default", "off")
    _mount("-t", "proc", "-o", f"nosuid,nodev,noexec,hidepid={hidden_processes}", "proc", "/proc")
    for path in rw:
        _mount("--bind", path, path)
    if unit.value("ProtectSystem") == "strict":
        _set_read_only(Path("/"))
        for path in writable:
            _set_read_only(path, off=True)
    protected = {"ProtectKernelTunables": ("/proc/sys", "/sys"), "ProtectControlGroups": ("/sys/fs/cgroup",)}
    for name in (name for key, names in protected.items() if unit.on(key) for name in names):
        _mount("--rbind", name, name)
        _set_read_only(Path(name))


def _replace(folders: Iterable[Path], keep: set[Path]) -> None:
    """An empty folder for each, in which only what is kept can be seen."""
    real = {path.resolve() for path in folders if path.is_dir()}
    with tempfile.TemporaryDirectory(dir="/var", prefix="ng-sandbox-") as stash:
        _mount("-t", "tmpfs", "tmpfs", stash)
        kept = {}
        for number, path in enumerate(sorted(path for path in keep if real & set(path.parents))):
            kept[path] = Path(stash) / str(number)
            kept[path].mkdir()
            _mount("--rbind", path, kept[path])
        for folder in sorted(real):
            _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", folder)
        for path, saved in kept.items():
            path.mkdir(parents=True, exist_ok=True)
            _mount("--rbind", saved, path)
        subprocess.run(["umount", "--recursive", "--lazy", stash], check=True)


def _rights(unit: Unit) -> None:
    os.umask(int(unit.value("UMask"), 8))
    core = int(unit.value("LimitCORE"))
    resource.setrlimit(resource.RLIMIT_CORE, (core, core))
    kept = {CAPABILITIES[name] for name in unit.words("CapabilityBoundingSet")}
    for capability in range(64):
        if capability not in kept and _libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
            _checked(_libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
    if unit.on("NoNewPrivileges"):
        _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _set_read_only(path: Path, *, off: bool = False) -> None:
    """Set or take away, for every mount at and below `path`: mount_setattr(2), Linux 5.12."""
    flag = MOUNT_ATTR_RDONLY
    attributes = _MountAttr(attr_clr=flag) if off else _MountAttr(attr_set=flag)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    name = os.fsencode(path)
    _checked(_libc.syscall(NR_MOUNT_SETATTR, AT_FDCWD, name, AT_RECURSIVE, ctypes.byref(attributes), size))


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
