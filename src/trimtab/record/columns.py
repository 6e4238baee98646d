"""Metrics as one array a metric, built from the lines of metrics.jsonl in the order in which they were written.

- A line without a step (missing, negative, no whole number, beyond 2**53) is left out.
- Lines of the same step are one row: an evaluation has its own line. Where two lines of a step both trained, the later counts.
- A line of an earlier step starts again there, as a resume does: rows from that step on are void.
- A value that was written but is no finite number (null, NaN, text) is NaN, as a missing one is; `written` tells them apart.

Adding a line takes time in proportion to the line, whatever number of rows there are. Arrays are copies: what is added later does
not change them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

STEP = "step"
TRAINED = "time/total"
"""Only the line of a training step has it."""
MAX_STEP = 2**53
NAN = float("nan")

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""(steps, values), finite values only, in step order."""


class _Column:
    """The rows in which a metric was written, and its values there."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows, self.values = array("q"), array("d")

    def put(self, row: int, value: float) -> None:
        if self.rows and self.rows[-1] == row:
            self.values[-1] = value
        else:
            self.rows.append(row)
            self.values.append(value)

    def cut(self, rows: int) -> None:
        kept = bisect_left(self.rows, rows)
        del self.rows[kept:], self.values[kept:]


class MetricTable:
    """Rows in step order; one column a metric."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps: list[int] = []
        self._columns: dict[str, _Column] = {}
        self.extend(lines)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def names(self) -> list[str]:
        """Metrics that some row has, in the order in which they first appeared."""
        return [name for name, column in self._columns.items() if column.rows]

    @property
    def steps(self) -> NDArray[np.int64]:
        return np.array(self._steps, dtype=np.int64)

    def column(self, name: str) -> NDArray[np.float64]:
        """A value for each row; NaN where it is missing or not finite."""
        found = np.full(len(self._steps), np.nan)
        if column := self._columns.get(name):
            found[np.frombuffer(column.rows, dtype=np.int64)] = np.frombuffer(column.values, dtype=np.float64)
            found[~np.isfinite(found)] = np.nan
        return found

    def written(self, name: str) -> NDArray[np.bool_]:
        """Whether each row has the metric, be it a finite number or not."""
        found = np.zeros(len(self._steps), dtype=bool)
        if column := self._columns.get(name):
            found[np.frombuffer(column.rows, dtype=np.int64)] = True
        return found

    def until(self, step: int) -> MetricTable:
        """The rows up to a step, in a table of their own."""
        found, rows = MetricTable(), bisect_right(self._steps, step)
        found._steps = self._steps[:rows]
        for name, column in self._columns.items():
            kept, mine = bisect_left(column.rows, rows), _Column()
            mine.rows, mine.values = column.rows[:kept], column.values[:kept]
            found._columns[name] = mine
        return found

    def points(self, name: str) -> Points:
        """The steps at which a metric has a finite value, and those values."""
        values = self.column(name)
        kept = np.isfinite(values)
        return self.steps[kept].astype(np.float64), values[kept]

    def extend(self, lines: Iterable[Mapping[str, Any]]) -> int:
        """Add lines; returns how many rows at the front are as they were before."""
        unchanged = len(self._steps)
        for line in lines:
            unchanged = min(unchanged, self._add(line))
        return unchanged

    def _add(self, line: Mapping[str, Any]) -> int:
        """Add a line; returns the index of its row, or the number of rows where it is left out."""
        step, steps = line.get(STEP), self._steps
        if type(step) is not int or not 0 <= step < MAX_STEP:
            return len(steps)
        if steps and step <= steps[-1] and (step < steps[-1] or (TRAINED in line and self._last_trained())):
            self._cut(bisect_left(steps, step))
        if not steps or steps[-1] != step:
            steps.append(step)
        row, columns = len(steps) - 1, self._columns
        for name, value in line.items():
            column = columns.get(name)
            if column is None:
                if name == STEP:
                    continue
                column = columns[name] = _Column()
            column.put(row, value if type(value) is float else _number(value))
        return row

    def _last_trained(self) -> bool:
        column = self._columns.get(TRAINED)
        return bool(column and column.rows and column.rows[-1] == len(self._steps) - 1)

    def _cut(self, rows: int) -> None:
        del self._steps[rows:]
        for column in self._columns.values():
            column.cut(rows)


def _number(value: Any) -> float:
    if type(value) is not int:  # a bool is none
        return NAN
    try:
        return float(value)
    except OverflowError:
        return NAN
