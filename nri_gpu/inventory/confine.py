"""Lets the NVML process go of what it does not need, before a driver's library is loaded into it."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

# linux/prctl.h, linux/capability.h
PR_SET_PDEATHSIG: Final = 1
PR_SET_NO_NEW_PRIVS: Final = 38
LINUX_CAPABILITY_VERSION_3: Final = 0x20080522
_CAPABILITY_WORDS: Final = 6  # effective, permitted, inheritable, twice 32 bits each


def confine() -> None:
    """No environment, no capabilities, none to be had back by a setuid program, and no life beyond the parent's.

    NVML asks the setuid nvidia-modprobe to make device nodes where they are missing; describing GPUs must not change
    the host, and NVIDIA's own container library drops the same (libnvidia-container: src/driver.c).
    Failures are ignored: each is a second fence, and a kernel without it still answers.
    """
    os.environ.clear()  # Python itself may have put LC_CTYPE there (PEP 538)
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    libc.capset(header, (ctypes.c_uint32 * _CAPABILITY_WORDS)())
    # The signal follows the thread that forked us: the daemon's main thread, which lives as long as the daemon.
    _prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(libc, PR_SET_NO_NEW_PRIVS, 1)


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero)
