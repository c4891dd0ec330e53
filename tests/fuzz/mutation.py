"""What the targets share: the loop that tries mutations, and how texts are mutated."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T", str, bytes)


class Texts(Struct, frozen=True):
    """What mutations begin with: texts that are understood, texts that are refused, and pieces worth putting in."""

    good: tuple[str, ...]
    bad: tuple[str, ...]
    grammar: tuple[str, ...]

    def mutated(self, dice: random.Random) -> str:
        """A text with a few short pieces cut, doubled, changed or put in."""
        value = dice.choice((*self.good, *self.bad) if dice.random() < 0.5 else self.good)
        for _ in range(dice.randint(1, 4)):
            at = dice.randint(0, len(value))
            end = min(len(value), at + dice.choice((0, 0, 1, 1, 2, 5)))
            near, far = dice.choice(self.grammar), chr(dice.choice((dice.randint(0, 127), dice.randint(0, 0xD7FF))))
            new = dice.choice((near, near, near, value[at:end], far))
            value = value[:at] + new + value[dice.choice((at, end)) :]
        return value * dice.choice((1, 1, 1, 1, 50))


def fuzz(check: Callable[[T], object], mutated: Callable[[random.Random], T], about: str | None) -> int:
    """Mutate until the time is over; what broke the invariant is printed. Returns an exit code."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="to repeat a run")
    options = parser.parse_args()
    dice, end, tried, good = random.Random(options.seed), time.monotonic() + options.seconds, 0, 0
    while time.monotonic() < end:
        value = mutated(dice)
        try:
            good += bool(check(value))
        except Exception:
            shown = value.hex() if isinstance(value, bytes) else ascii(value)
            print(f"seed {options.seed}, after {tried}: {shown}", file=sys.stderr)
            raise
        tried += 1
    print(f"{tried} inputs, {good} of them good, seed {options.seed}")
    return 0
