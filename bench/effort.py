"""How much is measured: one number, from which all the others follow."""

from __future__ import annotations

from typing import Final, Self

from msgspec import Struct

SAMPLES: Final = 60
LEAST: Final = 2  # below it there is no median of anything


class Effort(Struct, frozen=True):
    """What is done of each. idle_s: seconds of watching an idle daemon; synchronized: containers in one Synchronize."""

    containers: int
    requests: int
    starts: int
    idle_s: float
    synchronized: int

    @classmethod
    def of(cls, samples: int) -> Self:
        """samples: containers started per contender. Fewer than usual, and all else is cut in proportion."""
        part = min(1.0, samples / SAMPLES)
        return cls(
            containers=samples,
            requests=max(100, round(4000 * part)),
            starts=max(LEAST, round(7 * part)),
            idle_s=max(0.2, 10 * part),
            synchronized=max(100, round(5000 * part)),
        )
