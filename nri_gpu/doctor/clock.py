"""The kernel's clock: whether it is synchronized."""

from __future__ import annotations

import ctypes
from typing import Final

TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronized
_TIMEX_BYTES: Final = 512  # struct timex has 208


def clock_state() -> int:
    """Return the state as adjtimex(2) reports it, or a negative number if it fails. Nothing changes: `modes` is 0."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (OSError, AttributeError):
        return -1
