"""A unit's system call filters, by libseccomp as systemd has them; what is loaded stays for the process's life.

Sources: systemd.exec(5), systemd's src/shared/seccomp-util.c, seccomp_rule_add_array(3).
"""

import ctypes
import errno
import functools
import mmap
import os
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.support import packages
from tests.support.cache import cache_folder, kept
from tests.support.errors import HarnessError
from tests.support.unit_file import Unit

# seccomp.h
ACT_ALLOW: Final = 0x7FFF0000
ACT_ERRNO: Final = 0x00050000
CMP_EQ: Final = 4
CMP_GE: Final = 5
CMP_MASKED_EQ: Final = 7
FAMILIES: Final = 46  # AF_MAX (linux/socket.h)
UNKNOWN: Final = -1  # __NR_SCMP_ERROR
# linux/sched.h: the namespaces of clone(2), without the time namespace, whose bit lies in the exit signal there
NAMESPACES: Final = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
SHM_EXEC: Final = 0o100000
SETUID, SETGID = 0o4000, 0o2000


class _Compare(ctypes.Structure):
    """struct scmp_arg_cmp. arg: which argument; a, b: the value, or mask and value."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


class Filter:
    """One filter in the making; several may be loaded, and each of them has to agree."""

    def __init__(self, otherwise: int) -> None:
        self._lib = ctypes.CDLL("libseccomp.so.2")
        self._lib.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._lib.seccomp_init(ctypes.c_uint32(otherwise)))

    def rule(self, action: int, call: str, *compares: tuple[int, int, int, int]) -> None:
        """Add a rule. A call that this machine does not have is left out."""
        number = self._lib.seccomp_syscall_resolve_name(call.encode())
        if number == UNKNOWN:
            return
        array = (_Compare * len(compares))(*(_Compare(*compare) for compare in compares))
        result = self._lib.seccomp_rule_add_array(
            self._context, ctypes.c_uint32(action), ctypes.c_int(number), ctypes.c_uint(len(compares)), array
        )
        if result and result != -errno.EDOM:  # a call of another architecture
            raise HarnessError(f"seccomp rule for {call}: {os.strerror(-result)}")

    def load(self) -> None:
        """Make it count, for this process and its children, for good."""
        if result := self._lib.seccomp_load(self._context):
            raise HarnessError(f"seccomp filter not loaded: {os.strerror(-result)}")


def load_filters(unit: Unit) -> None:
    """Everything of a unit that systemd does by seccomp and that this module knows. The call filter comes last."""
    denied = Filter(ACT_ALLOW)
    if families := unit.words("RestrictAddressFamilies"):
        for family in range(FAMILIES):
            if family not in {getattr(socket, name) for name in families}:
                denied.rule(_errno(errno.EAFNOSUPPORT), "socket", (0, CMP_EQ, family, 0))
        denied.rule(_errno(errno.EAFNOSUPPORT), "socket", (0, CMP_GE, FAMILIES, 0))
    if unit.on("MemoryDenyWriteExecute"):
        write_execute = mmap.PROT_WRITE | mmap.PROT_EXEC
        denied.rule(_errno(errno.EPERM), "mmap", (2, CMP_MASKED_EQ, write_execute, write_execute))
        for call in ("mprotect", "pkey_mprotect"):
            denied.rule(_errno(errno.EPERM), call, (2, CMP_MASKED_EQ, mmap.PROT_EXEC, mmap.PROT_EXEC))
        denied.rule(_errno(errno.EPERM), "shmat", (2, CMP_MASKED_EQ, SHM_EXEC, SHM_EXEC))
    if unit.on("RestrictNamespaces"):
        denied.rule(_errno(errno.ENOSYS), "clone3")  # its flags are in memory, where no filter looks
        denied.rule(_errno(errno.EPERM), "setns")
        for call in ("clone", "unshare"):
            for flag in NAMESPACES:
                denied.rule(_errno(errno.EPERM), call, (0, CMP_MASKED_EQ, flag, flag))
    if unit.on("RestrictSUIDSGID"):
        for call, mode in (("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("open", 2), ("openat", 3), ("mkdir", 1)):
            for bit in (SETUID, SETGID):
                denied.rule(_errno(errno.EPERM), call, (mode, CMP_MASKED_EQ, bit, bit))
    allowed = Filter(_errno(getattr(errno, unit.value("SystemCallErrorNumber"))))
    for call in sorted(allowed_calls(unit)):
        allowed.rule(ACT_ALLOW, call)
    denied.load()
    allowed.load()


def allowed_calls(unit: Unit) -> set[str]:
    """The names that a unit's SystemCallFilter= lets pass."""
    calls = expand(["@default"])
    for value in unit.values("SystemCallFilter"):
        words = expand(value.removeprefix("~").split())
        calls = calls - words if value.startswith("~") else calls | words
    return calls


def expand(names: Iterable[str]) -> set[str]:
    """System call names, each @group by what systemd says is in it."""
    groups = {name for name in names if name.startswith("@")}
    return (set(names) - groups).union(*(expand(known_groups()[group]) for group in groups))


@functools.cache
def known_groups() -> dict[str, list[str]]:
    """What is in each group, by systemd-analyze. Kept, since a process that is confined already cannot run that."""

    def ask(folder: Path) -> None:
        analyze = packages.command("systemd-analyze", "systemd")
        with (folder / "groups").open("w") as file:
            # Where tracefs is not mounted it remarks on that, which is no fault of the program that is confined.
            subprocess.run([*analyze, "syscall-filter", "--no-pager"], stdout=file, stderr=subprocess.PIPE, check=True)

    found: dict[str, list[str]] = {}
    for line in (kept(cache_folder() / "syscall-groups", ask) / "groups").read_text().splitlines():
        if line.startswith("@"):
            group = found.setdefault(line, [])
        elif line.startswith(" ") and not line.lstrip().startswith("#"):
            group.append(line.strip())
    return found


def _errno(number: int) -> int:
    return ACT_ERRNO | number
