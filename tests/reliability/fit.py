"""A line through samples, and how sure its slope is."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct

STUDENT = 1.96  # of 95 in 100, for the hundreds of samples there are


class Slope(Struct, frozen=True):
    """Least squares. per_1000: of y for 1,000 of x; spread: either side, 95 of 100 if residuals are independent."""

    per_1000: float
    spread: float

    def __str__(self) -> str:
        return f"{self.per_1000:+.1f} ± {self.spread:.1f}"


def slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Raises: statistics.StatisticsError: fewer than three samples, or all at one x."""
    if len(x) < 3:
        raise statistics.StatisticsError("a slope with an interval needs three samples")
    line = statistics.linear_regression(x, y)
    residuals = [b - (line.intercept + line.slope * a) for a, b in zip(x, y, strict=True)]
    mean = statistics.fmean(x)
    error = (sum(r * r for r in residuals) / (len(x) - 2) / sum((a - mean) ** 2 for a in x)) ** 0.5
    return Slope(line.slope * 1000, STUDENT * error * 1000)
