"""Waiting for a fact, never for a time."""

import time
from collections.abc import Callable
from typing import Final

from tests.support.errors import HarnessError

POLL_S: Final = 0.01


def wait_for(
    what: str, ready: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = str, *, poll_s: float = POLL_S
) -> None:
    """Ask `ready` until it says yes. Raises: HarnessError after `timeout_s` seconds, with what `explain` knows."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise HarnessError(f"{what}: still waiting after {timeout_s:.0f} s. {explain()}")
        time.sleep(poll_s)
