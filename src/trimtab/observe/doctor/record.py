"""What the rules of the doctor ask of a run: its settings and, for every metric, values, level, trend and sudden shifts."""

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
from trimtab.record.reader import open_run

RECENT_STEPS = 20
"""Steps that count as now."""
EARLY_STEPS = 10
"""Steps that count as the beginning, at most."""
LEVEL_FACTOR = 4.0
"""A metric that changes so much at once, for good, has another level from there on."""
T = TypeVar("T", int, str, bool)


@dataclass(frozen=True)
class Record:
    """A run's settings and its steps, in order."""

    settings: Mapping[str, Any]
    """config.yaml as it is."""
    metrics: MetricTable
    finished: bool = False
    quiet_s: float = 0.0
    """Time since metrics were last written."""
    checkpoint: str | None = None
    """The newest whole one."""
    _points: dict[str, list[tuple[int, float]]] = field(default_factory=dict, repr=False, compare=False)
    _trends: dict[tuple[str, int], Trend] = field(default_factory=dict, repr=False, compare=False)
    _shifts: dict[tuple[str, float], Shift | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def steps(self) -> list[int]:
        """Steps that trained. An evaluation before the first has a row, but is no step."""
        steps = self.metrics.steps
        return [int(step) for step in steps[(steps > 0) & self.metrics.written(TRAINED)]]

    def setting(self, key: str, default: T) -> T:
        """A config value such as `learn.kl.coef`; the default where it is absent or of another kind (`auto`, say)."""
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
        return dtype == "bfloat16" or (dtype == "auto" and self.on_cuda)

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) where there is one."""
        if name not in self._points:
            steps, values = self.metrics.points(name)
            self._points[name] = list(zip(steps.astype(int).tolist(), values.tolist()))
        return self._points[name]

    def at(self, name: str, step: int) -> float | None:
        """The value of one step, None where it has none."""
        return dict(self.points(name)).get(step)

    def wrote_no_number(self, name: str) -> set[int]:
        """Steps at which a metric was written, but is no finite number."""
        table = self.metrics
        return set(table.steps[table.written(name) & np.isnan(table.column(name))].tolist())

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.points(name)]

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
        """Where a metric drops or rises by such a factor at once, and stays there."""
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
        """Over the whole run, but for the first `skip` values."""
        if (name, skip) not in self._trends:
            self._trends[name, skip] = trend(self.values(name)[skip:])
        return self._trends[name, skip]

    def share_of_time(self, phase: str) -> float | None:
        """Seconds of a phase over those of all steps. The first is left out where it can be: it compiles and warms up."""
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
    """The record of a run folder; a DataError that says what is missing where it is none."""
    reader = open_run(folder)
    reader.refuse_damaged()
    checkpoints = reader.checkpoint_steps
    record = Record(
        reader.settings(),
        reader.metrics,
        finished=reader.finished,
        quiet_s=reader.quiet_s(clock),
        checkpoint=f"step-{checkpoints[-1]}" if checkpoints else None,
    )
    if not record.steps:
        _refuse_lost(folder / METRICS_FILE, record)
    return record


def _refuse_lost(metrics: Path, record: Record) -> None:
    """A run that has just begun has no rows yet, or half of its first; one that got further has lost them."""
    held = metrics.read_bytes() if metrics.exists() else b""
    reached = "it is finished" if record.finished else f"it has the checkpoint {record.checkpoint}"
    if record.finished or record.checkpoint:
        state = "holds no step that can be read" if held else "is empty" if metrics.exists() else "is not there"
        raise DataError(
            f"{metrics} {state}, but the run has made some: {reached}. Nothing can be said of it without its metrics; put the "
            "file back"
        )
    if held and not held.startswith((b"{", b"\n")):
        raise DataError(f"{metrics} holds no lines of JSON. Nothing can be said of the run without its metrics")
