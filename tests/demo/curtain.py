"""What surrounds a demo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack

from tests.support.errors import HarnessError


def curtain(command: str, demonstrate: Callable[[ExitStack], None]) -> int:
    """Run it, and take away what it made. Returns an exit code."""
    if os.geteuid():
        print(f"{command} boots a containerd and needs root: run `sudo {command}`")
        return 77
    try:
        with ExitStack() as stack:
            demonstrate(stack)
    except HarnessError as error:
        print(f"\nThe demo could not go on: {error}", file=sys.stderr)
        return 1
    return 0
