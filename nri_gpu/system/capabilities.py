"""The capabilities of this process: set aside here, and there again in its children. Source: capabilities(7)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from typing import Final

# linux/capability.h, linux/prctl.h
CHOWN: Final = 0
DAC_READ_SEARCH: Final = 2
SYS_PTRACE: Final = 19
SYS_ADMIN: Final = 21
_VERSION_3: Final = 0x20080522
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_RAISE: Final = 2

_libc = ctypes.CDLL(None, use_errno=True)


class _Sets(ctypes.Structure):
    """The three sets of a thread, 32 capabilities of each (struct __user_cap_data_struct)."""

    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def set_aside(keep: Iterable[int] = (), hand_on: Iterable[int] = ()) -> None:
    """Do without all capabilities but those to keep, in this thread and in those that it starts.

    All stay permitted, or a process that may gain no privileges (NoNewPrivileges=) could not give its children any: a
    child that is root has them again with execve(2). hand_on: what a child has also where it is not root.

    Raises: OSError.
    """
    header, sets = _header(), _read()
    permitted = sets[0].permitted
    sets[0].effective = permitted & _mask(keep)
    sets[1].effective = 0
    for each in sets:
        each.inheritable = 0
    if os.geteuid():
        sets[0].inheritable = permitted & _mask(hand_on)
    _checked(_libc.capset(header, sets))
    if os.geteuid():
        for number in hand_on:
            if permitted & _mask((number,)):
                zero = ctypes.c_ulong(0)
                raised = ctypes.c_ulong(_PR_CAP_AMBIENT_RAISE)
                _checked(_libc.prctl(_PR_CAP_AMBIENT, raised, ctypes.c_ulong(number), zero, zero))


def permits(number: int) -> bool:
    """Return whether a capability, one of the first 32, is permitted. Raises: OSError."""
    return bool(_read()[0].permitted & _mask((number,)))


def _read() -> ctypes.Array[_Sets]:
    sets = (_Sets * 2)()
    _checked(_libc.capget(_header(), sets))
    return sets


def _header() -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * 2)(_VERSION_3, 0)


def _mask(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in set(numbers))


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
