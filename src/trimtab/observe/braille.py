"""A curve in braille characters: two columns and four rows of dots a character, so 60 characters show 120 stretches of a run.

Every stretch is drawn from its lowest to its highest value, so a spike of one step stays visible however long the run is. Values
that are missing or not finite are a gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BLANK = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""By column and row of a character, from the top."""


def span_of(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Lowest and highest finite value; None where there is none."""
    known = values[np.isfinite(values)]
    return (float(known.min()), float(known.max())) if len(known) else None


def braille(
    values: Sequence[float] | NDArray[np.float64],
    width: int,
    height: int,
    low: float | None = None,
    high: float | None = None,
) -> list[str]:
    """`height` lines of `width` characters, the highest value at the top. `low`, `high`: the axis, if not that of the values."""
    data = np.asarray(values, dtype=np.float64)
    found = span_of(data)
    if found is None:
        return [chr(BLANK) * width for _ in range(height)]
    low, high = found[0] if low is None else low, found[1] if high is None else high
    columns, rows = 2 * width, 4 * height
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for column, stretch in enumerate(stretches(data, columns)):
        known = span_of(stretch)
        if known is None:
            before = None
            continue
        lowest, highest = (_row(value, low, high, rows) for value in known)
        start, end = highest, lowest
        if before is not None:  # joined to its neighbour: a line, and no cloud of dots
            start, end = min(start, before[1] + 1), max(end, before[0] - 1)
        for row in range(start, end + 1):
            cells[row // 4][column // 2] |= DOTS[column % 2][row % 4]
        before = (highest, lowest)
    return ["".join(chr(BLANK + dots) for dots in line) for line in cells]


def stretches(values: NDArray[np.float64], columns: int) -> list[NDArray[np.float64]]:
    """The values of each column of dots. A run with fewer steps than columns is stretched over all of them."""
    edges = np.linspace(0, len(values), columns + 1)
    starts = np.minimum(np.floor(edges[:-1]).astype(int), len(values) - 1)
    ends = np.maximum(np.floor(edges[1:]).astype(int), starts + 1)
    return [values[start:end] for start, end in zip(starts, ends)]


def _row(value: float, low: float, high: float, rows: int) -> int:
    """The row of dots of a value, from the top; the middle where all values are equal."""
    if high <= low:
        return rows // 2
    return round((rows - 1) * (1 - (min(max(value, low), high) - low) / (high - low)))
