"""The record of a run that doctor rules read: its settings and, for every metric, values, level, trend and sudden shifts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from trimtab.base.errors import DataError
from trimtab.observe.doctor.shift import Shift, lasting_change
from trimtab.observe.doctor.trend import Trend, trend
from trimtab.record.columns import TRAINED, MetricTable
from trimtab.record.layout import METRICS_FILE
from trimtab.record.reader import RunReader, open_run

RECENT_STEPS = 20
"""Last steps that count as "now"."""
EARLY_STEPS = 10
"""Most first steps that count as the beginning."""
LEVEL_FACTOR = 4.0
"""A metric that changes by this factor from one step to the next, and stays there, has shifted to a new level."""
LARGEST = 1e150
"""Rules see larger values as this one, so that sums of squares stay numbers: a run that diverges may write 1e308."""
T = TypeVar("T", int, str, bool)


@dataclass(frozen=True)
class Record:
    """A run's settings and its steps, in order."""

    settings: Mapping[str, Any]
    """config.yaml, unchanged."""
    metrics: MetricTable
    finished: bool = False
    quiet_s: float = 0.0
    """Time since metrics were last written."""
    checkpoint: str | None = None
    """Name of the newest complete checkpoint."""
    _points: dict[str, list[tuple[int, float]]] = field(default_factory=dict, repr=False, compare=False)
    _values: dict[str, list[float]] = field(default_factory=dict, repr=False, compare=False)
    _trends: dict[tuple[str, int], Trend] = field(default_factory=dict, repr=False, compare=False)
    _shifts: dict[tuple[str, float], Shift | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def steps(self) -> list[int]:
        """Steps that trained. The evaluation before training has a row (step 0), but is not a step."""
        steps = self.metrics.steps
        return [int(step) for step in steps[(steps > 0) & self.metrics.written(TRAINED)]]

    def setting(self, key: str, default: T) -> T:
        """A config value such as `learn.kl.coef`; the default where it is absent or of another type (`auto`, for example)."""
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value if type(value) is type(default) else default

    @property
    def updates_per_batch(self) -> int:
        """1 is strictly on-policy."""
        return self.setting("learn.updates_per_step", 1) * self.setting("learn.epochs_per_step", 1)

    @property
    def on_cuda(self) -> bool:
        return self.setting("run.device", "cpu") == "cuda"

    @property
    def half_precision(self) -> bool:
        dtype = self.setting("model.dtype", "auto")
        return dtype in ("bfloat16", "float16") or (dtype == "auto" and self.on_cuda)

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that has a value."""
        if name not in self._points:
            steps, values = self.metrics.points(name)
            values = np.clip(values, -LARGEST, LARGEST)
            self._points[name] = list(zip(steps.astype(int).tolist(), values.tolist()))
        return self._points[name]

    def at(self, name: str, step: int) -> float | None:
        """The value of one step, or None."""
        return dict(self.points(name)).get(step)

    def wrote_no_number(self, name: str) -> set[int]:
        """Steps whose value of a metric is not a finite number."""
        table = self.metrics
        return set(table.steps[table.written(name) & np.isnan(table.column(name))].tolist())

    def values(self, name: str) -> list[float]:
        if name not in self._values:
            self._values[name] = [value for _, value in self.points(name)]
        return self._values[name]

    def recent(self, name: str, steps: int = RECENT_STEPS) -> list[float]:
        return self.values(name)[-steps:]

    def now(self, name: str) -> float | None:
        """Median of the recent steps."""
        values = self.recent(name)
        return median(values) if values else None

    def early(self, name: str) -> float | None:
        """Median of the first steps: at most a quarter of the run, and none after a lasting change of level."""
        values, shift = self.values(name), self.shift(name)
        first = values[: min(EARLY_STEPS, max(1, len(values) // 4), shift.at if shift else EARLY_STEPS)]
        return median(first) if first else None

    def shift(self, name: str, factor: float = LEVEL_FACTOR) -> Shift | None:
        """The place where a metric drops or rises by `factor` from one step to the next, and stays there."""
        if (name, factor) not in self._shifts:
            self._shifts[name, factor] = lasting_change(self.values(name), factor)
        return self._shifts[name, factor]

    def shift_step(self, name: str, shift: Shift) -> int:
        """The first step at the new level."""
        return self.points(name)[shift.at][0]

    def mean(self, name: str) -> float | None:
        values = self.recent(name)
        return fmean(values) if values else None

    def trend(self, name: str, skip: int = 0) -> Trend:
        """The trend over the whole run without its first `skip` values."""
        if (name, skip) not in self._trends:
            self._trends[name, skip] = trend(self.values(name)[skip:])
        return self._trends[name, skip]

    def share_of_time(self, phase: str) -> float | None:
        """A phase's share of the time of all steps. The first step compiles and warms up, so it is left out if others exist."""
        parts, totals = self.metrics.column(f"time/{phase}"), self.metrics.column("time/total")
        both = ~np.isnan(parts) & (totals != 0) & ~np.isnan(totals)
        rows = list(zip(parts[both].tolist(), totals[both].tolist()))
        rows = rows[1:] or rows
        total = sum(whole for _, whole in rows)
        return sum(part for part, _ in rows) / total if total else None

    def span(self, name: str, steps: int = RECENT_STEPS) -> str:
        """`steps 41 to 60`: where the recent values of a metric come from."""
        places = [step for step, _ in self.points(name)][-steps:]
        return f"step {places[0]}" if len(places) == 1 else f"steps {places[0]} to {places[-1]}"


def read_record(folder: Path, clock: Callable[[], float] = time.time) -> Record:
    """Reads the record of a run folder, or raises a DataError that says what is missing."""
    reader = open_run(folder)
    record = record_of(reader, reader.settings(), clock)
    refuse_what_cannot_be_judged(reader, record)
    return record


def record_of(reader: RunReader, settings: Mapping[str, Any], clock: Callable[[], float] = time.time) -> Record:
    """The record of a run that was read, whatever became of its files."""
    checkpoints = reader.checkpoint_steps
    return Record(
        settings,
        reader.metrics,
        finished=reader.finished,
        quiet_s=reader.quiet_s(clock),
        checkpoint=f"step-{checkpoints[-1]}" if checkpoints else None,
    )


def refuse_what_cannot_be_judged(reader: RunReader, record: Record) -> None:
    """A DataError where lines of metrics.jsonl cannot be read, or where all of them are lost."""
    reader.refuse_damaged()
    if not record.steps:
        _refuse_lost(reader.folder / METRICS_FILE, record)


def _refuse_lost(metrics: Path, record: Record) -> None:
    """A new run has no rows yet, or half of its first. A run that got further has lost its rows."""
    held = metrics.read_bytes() if metrics.exists() else b""
    reached = "it is finished" if record.finished else f"it has the checkpoint {record.checkpoint}"
    if record.finished or record.checkpoint:
        state = "holds no step that can be read" if held else "is empty" if metrics.exists() else " is missing"
        raise DataError(
            f"{metrics} {state}, but the run has trained: {reached}. The doctor cannot judge a run without its metrics. "
            "Restore the file"
        )
    if held and not held.startswith((b"{", b"\n")):
        raise DataError(
            f"{metrics} holds no JSON lines. The doctor cannot judge a run without its metrics. Restore the file"
        )
