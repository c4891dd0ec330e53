"""Pauses between attempts: each is twice as long as the one before, up to a longest."""

from __future__ import annotations

import random


class Backoff:
    """The pauses of one thing that is tried until it works. jitter: the random share of each pause, from 0 to 1."""

    def __init__(self, first_s: float, longest_s: float, *, jitter: float = 0.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._jitter = jitter
        self.failures = 0  # since the last `reset`

    def next_s(self) -> float:
        """Count a failure. Returns the seconds to wait before the next attempt."""
        pause_s = min(self._first_s * 2.0 ** min(self.failures, 32), self._longest_s)
        self.failures += 1
        return pause_s * random.uniform(1 - self._jitter, 1)

    def reset(self) -> None:
        """It worked: the next pause is the first again."""
        self.failures = 0
