"""Sudden changes of level that last. A trend over the whole run does not see them: one step and a long tail have no slope.

Two kinds are told, since noise comes in two kinds:
- a change by a factor, of what is positive and steady within a factor (entropy, gradient norm, lengths): nine tenths of what
  follows lie that factor away from nine tenths of what was before, so that a single value may stand for "before";
- a fall of something whose noise is known (the mean reward of a step): the split with the clearest difference of means, believed
  from eight standard errors on, which covers the choice of the split and neighbours that have half of their noise in common.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIN_VALUES_AT_NEW_LEVEL = 4
"""Fewest values at a new level."""
MAX_OUTLIER_SHARE = 0.1
"""Share of the values on either side that may lie anywhere."""
NEGATIVE_ROUNDING_SHARE = 1e-3
"""Rounding makes an entropy of 0 slightly negative. Values above minus this share of the largest count as 0."""
MIN_STANDARD_ERRORS = 8.0


@dataclass(frozen=True)
class Shift:
    at: int
    """Index of the first value at the new level."""
    before: float
    """Median."""
    after: float
    """Median."""


def lasting_change(values: Sequence[float], factor: float) -> Shift | None:
    """Where positive values drop, or rise, by at least this factor and stay there."""
    if len(values) <= MIN_VALUES_AT_NEW_LEVEL or min(values) < -NEGATIVE_ROUNDING_SHARE * max(values):
        return None
    values = [max(0.0, value) for value in values]
    return _drop(values, factor) or _rise(values, factor)


def _drop(values: Sequence[float], factor: float) -> Shift | None:
    lowest = _running(values, low=True)
    highest = _running(values[::-1], low=False)[::-1]
    gaps = [lowest[k - 1] - factor * highest[k] for k in range(1, len(values) - MIN_VALUES_AT_NEW_LEVEL + 1)]
    best = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[best] <= 0:
        return None
    return _split(values, (lowest[best] + highest[best + 1]) / 2, falls=True)


def _rise(values: Sequence[float], factor: float) -> Shift | None:
    highest = _running(values, low=False)
    lowest = _running(values[::-1], low=True)[::-1]
    gaps = [lowest[k] - factor * highest[k - 1] for k in range(1, len(values) - MIN_VALUES_AT_NEW_LEVEL + 1)]
    best = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[best] <= 0 or highest[best] <= 0:  # from nothing to something is how a KL begins
        return None
    return _split(values, (highest[best] + lowest[best + 1]) / 2, falls=False)


def _running(values: Sequence[float], low: bool) -> list[float]:
    """For each start of the series, its lowest (or highest) value but for the outliers that are allowed."""
    held: list[float] = []
    found = []
    for count, value in enumerate(values, 1):
        insort(held, value)
        outliers = int(MAX_OUTLIER_SHARE * count)
        found.append(held[outliers] if low else held[-1 - outliers])
    return found


def _split(values: Sequence[float], between: float, falls: bool) -> Shift:
    """The split that leaves the fewest values on the wrong side of `between`."""
    wrong = [(value > between) == falls for value in values]  # would be, if the value came after the split
    misplaced = best = sum(wrong)
    at = 0
    for index, would_be in enumerate(wrong, 1):
        misplaced += -1 if would_be else 1
        if misplaced < best:
            at, best = index, misplaced
    return Shift(at, median(values[:at]), median(values[at:]))


def clear_fall(values: Sequence[float], least_scatter: float) -> Shift | None:
    """The split after which values are lower on average, where noise would not make it so. `least_scatter`: what is known of the
    noise of one value, however little a series scatters."""
    best_errors, best = 0.0, None
    total = sum(values)
    squares = sum(value**2 for value in values)
    first = first_squares = 0.0
    for at in range(1, len(values) - MIN_VALUES_AT_NEW_LEVEL + 1):
        first += values[at - 1]
        first_squares += values[at - 1] ** 2
        left = len(values) - at
        within = first_squares - first**2 / at + squares - first_squares - (total - first) ** 2 / left
        scatter = max(least_scatter, math.sqrt(max(0.0, within) / len(values)), 1e-9)
        errors = (first / at - (total - first) / left) / (scatter * math.sqrt(1 / at + 1 / left))
        if errors > best_errors:
            best_errors, best = errors, at
    if best is None or best_errors < MIN_STANDARD_ERRORS:
        return None
    return Shift(best, median(values[:best]), median(values[best:]))
