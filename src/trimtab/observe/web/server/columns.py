"""Metrics as a browser gets them: the length of a JSON header in four bytes, little-endian; the header; then a float32 column for
the steps and one for each name. Names that the header has in `wide` come last, as float64 at a multiple of eight bytes: clocks
and counts that float32 would round to other numbers. NaN is missing.

With `points`, rows are put together so that no more are sent: each stretch of rows becomes two, with the least and the greatest
value of every metric there, in the order in which they occurred. Nothing that a chart of that width could show is lost: a
spike of one step stays."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.observe.web.encode import needs_float64
from trimtab.record.columns import MetricTable

MIN_POINTS = 8


def metrics_body(
    table: MetricTable,
    names: Sequence[str] | None = None,
    first: float | None = None,
    last: float | None = None,
    points: int | None = None,
    more: Mapping[str, Any] | None = None,
) -> bytes:
    """Columns of the names that there are, or of all; of the steps from `first` to `last`; at most `points` rows."""
    steps = table.steps.astype(np.float64)
    kept = np.ones(len(steps), dtype=bool)
    kept &= steps >= first if first is not None else True
    kept &= steps <= last if last is not None else True
    known = table.names
    chosen = known if names is None else [name for name in dict.fromkeys(names) if name in set(known)]
    columns = np.stack([table.column(name)[kept] for name in chosen]) if chosen else np.empty((0, int(kept.sum())))
    steps = steps[kept]
    rows = len(steps)
    if points is not None and rows > max(points, MIN_POINTS):
        steps, columns = envelope(steps, columns, max(points, MIN_POINTS))
    is_wide = [needs_float64(column) for column in columns]
    wide = [name for name, needed in zip(chosen, is_wide) if needed]
    header = {"steps": rows, "names": chosen, "wide": wide, "rows": len(steps), **(more or {})}
    return _packed(header, steps, columns, np.array(is_wide, dtype=bool))


def envelope(
    steps: NDArray[np.float64], columns: NDArray[np.float64], points: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most `points` rows: two for each of equally long stretches, with least and greatest value in order of occurrence."""
    rows = len(steps)
    length = -(-rows // (points // 2))
    count = -(-rows // length)
    padded = np.full((len(columns), count * length), np.nan)
    padded[:, :rows] = columns
    cut = padded.reshape(len(columns), count, length)
    empty = np.isnan(cut).all(axis=2)
    low_at = np.where(np.isnan(cut), np.inf, cut).argmin(axis=2)
    high_at = np.where(np.isnan(cut), -np.inf, cut).argmax(axis=2)
    low = np.take_along_axis(cut, low_at[:, :, None], axis=2)[:, :, 0]
    high = np.take_along_axis(cut, high_at[:, :, None], axis=2)[:, :, 0]
    rising = low_at <= high_at
    pairs = np.stack([np.where(rising, low, high), np.where(rising, high, low)], axis=2)
    pairs[empty] = np.nan
    starts = np.arange(count) * length
    ends = np.minimum(starts + length, rows) - 1
    return np.stack([steps[starts], steps[ends]], axis=1).reshape(-1), pairs.reshape(len(columns), -1)


def _packed(
    header: Mapping[str, Any], steps: NDArray[np.float64], columns: NDArray[np.float64], wide: NDArray[np.bool_]
) -> bytes:
    """The header is filled up with spaces so that all columns lie at a multiple of their size, as typed arrays need it."""
    text = json.dumps(header).encode()
    narrow = np.concatenate([steps[None, :], columns[~wide]]).astype("<f4")
    text += b" " * (-(4 + len(text) + narrow.nbytes) % 8)
    return struct.pack("<I", len(text)) + text + narrow.tobytes() + columns[wide].astype("<f8").tobytes()
