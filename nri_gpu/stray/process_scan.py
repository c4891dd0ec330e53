"""A look at /proc for the processes that have NVIDIA's device nodes open.

It takes a second on a full node, so it runs in a child process, which can be ended when it takes longer:

    python -I -m nri_gpu.stray.process_scan [--libcuda] OWNER_PID MAJOR ...

It prints a line of JSON for each such process, a `Use`, and at the end one for all, an `Extent`. With --libcuda it also
reads what each process has mapped, which takes twice as long, and prints those that map libcuda. What the owner itself
has open through its children is left out, and of one cgroup what HOLDERS_MAX before it have open: a container can have
a hundred thousand processes, and the daemon answers the runtime besides reading these lines.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

import msgspec

from nri_gpu.domain.fair_share import by_turn
from nri_gpu.stray.uses import CLOSED_MAX, LIBCUDA, DeviceNumber, Extent, Use
from nri_gpu.system.proc import (
    PATH_MAX,
    PROC,
    Stat,
    has_hosts_pids,
    living_thread,
    name_process,
    parse_cgroups,
    parse_stat,
)

# statx(2), linux/stat.h, linux/fcntl.h. Not os.stat, which waits for a file server that does not answer.
_AT_FDCWD, _DONT_SYNC, _STATX_TYPE, _STATX_BYTES = -100, 0x4000, 0x1, 256
_MODE_AT, _RDEV_AT = 28, 128
_WAITS: Final = "D"  # a thread's state (proc(5), stat)
_O_PATH: Final = 0o10000000  # such a descriptor opens no device (asm-generic/fcntl.h)
# kcmp(2): 0 for the same table, negative where a sandbox or the kernel forbids it. linux/kcmp.h.
_KCMP: Final = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
_KCMP_FILES: Final = 2
NICE: Final = 10
_ALONE: Final = 3
FILES_OF_TURN: Final = (64, 1024, 16_384, 1 << 30)  # a process that has more open waits for the next turn
READ_S: Final = 12.0  # for the files of all processes; who asked waits for 20 s, and has other things to see
HOLDERS_MAX: Final = 256  # processes of one cgroup with one node, which are named
_LIBCUDA_FILE: Final = b"/libcuda.so"
_USERS: Final = "ns/user"  # the user namespace of a process
_NO_NUMBER: Final = (-1, -1)  # stands for the mapped library where processes of a cgroup are counted


def main(arguments: list[str]) -> int:
    maps_too, numbers = arguments[:1] == [LIBCUDA], [int(each) for each in arguments if each != LIBCUDA]
    with suppress(OSError):  # a hardened unit may not
        os.nice(NICE)
    for found in scan(numbers[0], frozenset(numbers[1:]), maps_too=maps_too):
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    return 0


def scan(
    owner: int, majors: frozenset[int], *, maps_too: bool = False, limit_s: float = READ_S
) -> Iterator[Use | Extent]:
    """Yield each process with nodes of these majors open, as the module says, and then how far that reaches."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 (the names are enough)
    named, files = Counter[tuple[tuple[str, ...], DeviceNumber]](), Counter[DeviceNumber]()
    read = _Reading(majors, time.monotonic() + limit_s)
    for pid, opened in read.opened(pids):
        try:
            files.update(opened)
            libcuda = maps_too and _maps_libcuda(pid)
            use = _use(pid, owner, tuple(sorted({*opened})), libcuda=libcuda) if opened or libcuda else None
        except PermissionError:
            read.closed.append(pid)
            continue
        except OSError:  # it ended meanwhile
            continue
        holds = [(use.cgroups, number) for number in use.numbers or (_NO_NUMBER,)] if use else []
        if use and any(named[each] < HOLDERS_MAX for each in holds):
            named.update(holds)
            yield use
    whole = has_hosts_pids() and 1 in pids
    counted = tuple((*number, count) for number, count in sorted(files.items()))
    closed_in = {cgroup for pid in (*read.closed, *read.late) for cgroup in _cgroups_if_there(pid)}
    cut = tuple(sorted(closed_in)[:CLOSED_MAX])
    yield Extent(len(pids), len(read.closed), whole, _cgroups(PROC / "self"), counted, cut, len(read.late))


class _Reading:
    """The reading of files that processes have open, of majors, until a moment on the clock.

    A process may have a million files open, and a container as many such processes as it likes. So those with few are
    read first, of others the first of each cgroup before the second of any. closed: who may not be looked into. late:
    whom there was no time for.
    """

    def __init__(self, majors: frozenset[int], until: float) -> None:
        self._majors = majors
        self._until = until
        self.closed = list[int]()
        self.late = list[int]()

    def opened(self, pids: Iterable[int]) -> Iterator[tuple[int, list[DeviceNumber]]]:
        """Yield processes with the numbers of NVIDIA's nodes that they have open, each as often as it does."""
        for most in FILES_OF_TURN:
            larger = list[int]()
            for pid in pids:
                try:
                    files = (number for tid in _tables(pid) for number in _open_files(tid, self._majors))
                    found = [*islice(takewhile(self._has_time, files), most)]
                    if len(found) == most:
                        larger.append(pid)
                    elif not self._has_time():
                        self.late.append(pid)
                    else:
                        yield pid, [number for number in found if number]
                except PermissionError:
                    self.closed.append(pid)
                except OSError:  # it ended meanwhile
                    continue
            pids = by_turn(larger, _cgroups_if_there)

    def _has_time(self, _: object = None) -> bool:
        return time.monotonic() < self._until


def _cgroups_if_there(pid: int) -> tuple[str, ...]:
    try:
        return _cgroups(PROC / str(pid))
    except OSError:
        return ()


def _use(pid: int, owner: int, numbers: tuple[DeviceNumber, ...], *, libcuda: bool) -> Use | None:
    """Return the use of a process, or None if it is the owner's. Raises: OSError: it is gone, or may not be seen."""
    if owner in _ancestors(pid):
        return None
    before, thread = _stat(pid), living_thread(pid)
    program, cgroups = _program(thread), _cgroups(thread)
    if _stat(pid).started != before.started:  # another process has the pid by now
        raise ProcessLookupError(pid)
    return Use(pid, before.started, program, cgroups, numbers, libcuda=libcuda, waits=before.state == _WAITS)


def _tables(pid: int) -> Iterator[int]:
    """Yield a thread for each table of open files.

    Threads may have tables of their own, and the first thread may have ended.
    """
    yield pid
    # Most processes have one thread, which the folder's links tell: 2, and one for each (fs/proc/base.c).
    if os.stat(task := f"/proc/{pid}/task").st_nlink == _ALONE:  # noqa: PTH116
        return
    for tid in map(int, os.listdir(task)):  # noqa: PTH208
        if tid != pid and _KCMP and _syscall(_KCMP, pid, tid, _KCMP_FILES, 0, 0) > 0:
            yield tid


def _open_files(pid: int, majors: frozenset[int]) -> Iterator[DeviceNumber | None]:
    """Yield the number of each open file that is a node of these majors, and None for each other."""
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            number = _device(b"/proc/%d/fd/%s" % (pid, entry.name.encode()))
            yield number if number and number[0] in majors and not _is_path_only(pid, entry.name) else None


def _maps_libcuda(pid: int) -> bool:
    """Return whether a process maps libcuda. Raises: OSError. It may wait as long as the process changes its maps."""
    with open(f"{living_thread(pid)}/maps", "rb") as file:  # noqa: PTH123
        return any(_LIBCUDA_FILE in line for line in file)


def _device(path: bytes) -> DeviceNumber | None:
    """Return major and minor if it is a character device, else None. Raises: PermissionError: that may not be seen."""
    if _statx(_AT_FDCWD, path, _DONT_SYNC, _STATX_TYPE, _buffer):
        if ctypes.get_errno() == errno.EACCES:
            os.readlink(path)  # noqa: PTH115 - fails too, unless it is the file's own file system that refuses
        return None
    (mode,) = struct.unpack_from("=H", _buffer, _MODE_AT)
    major, minor = struct.unpack_from("=II", _buffer, _RDEV_AT)
    return (major, minor) if stat.S_ISCHR(mode) else None


def _is_path_only(pid: int, name: str) -> bool:
    flags = next((line for line in _text(f"/proc/{pid}/fdinfo/{name}").splitlines() if line.startswith("flags:")), "")
    return bool(int(flags.split()[1], 8) & _O_PATH)


def _ancestors(pid: int) -> Iterator[int]:
    with suppress(OSError):
        while pid > 0:
            yield pid
            pid = _stat(pid).parent


def _stat(pid: int) -> Stat:
    return parse_stat(_text(f"/proc/{pid}/stat"))


def _program(thread: Path) -> str:
    """Return a program's path, in brackets where its user could choose it, so that no exception holds.

    With a user namespace anybody mounts a program over another; a path beyond 4096 bytes is not shown, and the name of
    a process is its own choice.
    """
    try:
        path = os.fsencode(os.readlink(thread / "exe"))[:PATH_MAX].decode(errors="replace")  # noqa: PTH115
        return path if os.readlink(thread / _USERS) == os.readlink(PROC / "self" / _USERS) else f"[{path}]"  # noqa: PTH115
    except OSError:
        return f"[{_text(f'{thread}/comm').strip()}]"


def _cgroups(thread: Path) -> tuple[str, ...]:
    return parse_cgroups(_text(f"{thread}/cgroup"))


def _text(path: str) -> str:
    with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs a third of the look
        return file.read().decode(errors="replace")


_libc: Final = ctypes.CDLL(None, use_errno=True)
_statx, _syscall = _libc.statx, _libc.syscall
_buffer: Final = ctypes.create_string_buffer(_STATX_BYTES)

if __name__ == "__main__":
    name_process("scan")
    sys.exit(main(sys.argv[1:]))
