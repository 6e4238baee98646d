"""Trends that noise does not make: Theil-Sen's slope, believed only with Mann-Kendall's test and a change beyond the scatter.

A series is first cut into at most 24 stretches of equal length and each is replaced by its median: outliers go, most of the
correlation between neighbours goes, and the pairs to look at stay few. A trend is then called one only if
- the order of the medians is one that noise gives less than once in a thousand series, either way (|z| >= 3.3, where what
  neighbours still have in common widens the spread to expect), and
- the fitted change from end to end is at least twice the scatter of the medians around the line.
How large a change matters is the caller's to say, in the metric's own unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median

MIN_POINTS = 20
"""A shorter series has no trend."""
TREND_STRETCHES = 24
MIN_TREND_Z = 3.3
MIN_CHANGE_OVER_SCATTER = 2.0
MAX_CORRELATION = 0.5
"""Neighbours on a true but curved trend lie on the same side of the line, too: more than this, and it would not be seen."""


@dataclass(frozen=True)
class Trend:
    """A line through a series: its values at both ends, and whether to believe that it is not level."""

    start: float
    end: float
    sure: bool

    @property
    def change(self) -> float:
        return self.end - self.start

    def rises(self, by: float = 0.0) -> bool:
        return self.sure and self.change > max(by, 0.0)

    def falls(self, by: float = 0.0) -> bool:
        return self.sure and -self.change > max(by, 0.0)


LEVEL = Trend(0.0, 0.0, sure=False)


def trend(values: Sequence[float]) -> Trend:
    """Trend of values in order; `LEVEL` where there are too few."""
    if len(values) < MIN_POINTS:
        return LEVEL
    points = stretches(values, TREND_STRETCHES)
    slope = median((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(points), 2))
    middle = median(y - slope * x for x, y in enumerate(points))
    last = len(points) - 1
    change = slope * last
    beside = [y - middle - slope * x for x, y in enumerate(points)]
    common = min(MAX_CORRELATION, max(0.0, correlation(beside)))
    z = kendall_z(points) / math.sqrt((1 + common) / (1 - common))
    sure = abs(z) >= MIN_TREND_Z and abs(change) >= MIN_CHANGE_OVER_SCATTER * median(map(abs, beside))
    return Trend(middle, middle + change, sure)


def stretches(values: Sequence[float], at_most: int) -> list[float]:
    """Medians of equal stretches, in order."""
    count = min(at_most, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    return [median(values[start:end]) for start, end in pairwise(edges)]


def kendall_z(points: Sequence[float]) -> float:
    """Mann-Kendall's statistic: how far rises and falls among all pairs are from balance, in standard deviations."""
    n = len(points)
    s = sum((b > a) - (b < a) for a, b in combinations(points, 2))
    tied = [points.count(value) for value in set(points)]
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in tied)) / 18
    return 0.0 if s == 0 or variance <= 0 else (s - math.copysign(1, s)) / math.sqrt(variance)


def correlation(values: Sequence[float]) -> float:
    """Between neighbours."""
    mean = fmean(values)
    total = sum((value - mean) ** 2 for value in values)
    return sum((a - mean) * (b - mean) for a, b in pairwise(values)) / total if total > 0 else 0.0
