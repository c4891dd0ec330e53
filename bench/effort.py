"""How much is measured: one number, from which all the others follow."""

from __future__ import annotations

from typing import Final, Self

from msgspec import Struct

SAMPLES: Final = 60
LEAST: Final = 2  # below it there is no median of anything


class Effort(Struct, frozen=True):
    """What is done of each.

    warm_up, warm_up_rounds: requests, and containers of each contender, that are not counted. settle_s, idle_s: seconds
    until a daemon is idle, and of watching it then. synchronized: containers in one Synchronize. crowds: rounds of
    containers that start at once; jobs: how many start them, each `crowd`, one after another.
    """

    containers: int
    requests: int
    warm_up: int
    warm_up_rounds: int
    starts: int
    settle_s: float
    idle_s: float
    synchronized: int
    crowds: int
    jobs: int
    crowd: int

    @classmethod
    def of(cls, samples: int) -> Self:
        """samples: containers started per contender. Fewer than usual, and all else is cut in proportion."""
        part = min(1.0, samples / SAMPLES)
        return cls(
            containers=samples,
            requests=max(100, round(4000 * part)),
            warm_up=round(300 * part),
            warm_up_rounds=round(3 * part),
            starts=max(1, round(7 * part)),
            settle_s=max(0.2, 1 * part),
            idle_s=max(0.2, 10 * part),
            synchronized=max(100, round(5000 * part)),
            crowds=max(LEAST, samples // 12),
            jobs=min(8, samples),
            crowd=max(1, round(3 * part)),
        )
