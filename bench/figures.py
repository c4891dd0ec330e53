"""The lines of the table, and the arithmetic behind them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct

NAME_WIDTH = 58


class Figure(Struct, frozen=True):
    """One line of the table. must, aim: at most; None where the budget names none. note: what else there is to know."""

    name: str
    value: float
    unit: str
    must: float | None = None
    aim: float | None = None
    note: str = ""

    def line(self) -> str:
        """The line, with its mark: `aim` is met, `ok` only what must be, `OVER` neither."""
        mark = ""
        if self.must is not None and self.aim is not None:
            mark = "aim" if self.value <= self.aim else "ok" if self.value <= self.must else "OVER"
        budget = "" if self.must is None else f"<= {self.must:g} (aim {self.aim:g})"
        line = f"{self.name:<{NAME_WIDTH}} {self.value:>9.2f} {self.unit:<5} {budget:<22} {mark:<4} {self.note}"
        return line.rstrip()


class Ratio(Struct, frozen=True):
    """A median of ratios. spread: it lies within so much of it, either side, nineteen times of twenty."""

    median: float
    spread: float

    def rounded(self) -> Ratio:
        return Ratio(round(self.median, 4), round(self.spread, 4))


def percentile(samples: Sequence[float], percent: int) -> float:
    """Between the two samples that are nearest."""
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Each of ours to the one of theirs that was measured in the same round: what slows a round, slows both.

    The spread is that of a box plot's notch (McGill, Tukey, Larsen 1978), which asks for no particular distribution.
    """
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, 1.57 * (upper - lower) / len(ratios) ** 0.5)
