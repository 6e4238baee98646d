"""What a run folder tells, read without torch and without trust: killed, resumed, unfinished and newer runs included.

- A torn last line of metrics.jsonl is left out. A line that repeats an earlier step starts that step again, as a resume does:
  what lay after it is void. Lines of the same step (evaluation has its own) are one row.
- A value that is missing, null, NaN or no number is not there; metrics and keys this version does not know are left alone.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import yaml

from trimtab.base.errors import DataError
from trimtab.observe.doctor.shift import Shift, lasting_change
from trimtab.observe.doctor.trend import Trend, trend
from trimtab.record.sinks import METRICS_FILE, read_metrics

CONFIG, FINAL, CHECKPOINTS = "config.yaml", "final", "checkpoints"
RECENT = 20
"""Steps that count as now."""
EARLY = 10
"""Steps that count as the beginning, at most."""
LEVEL_FACTOR = 4.0
"""A metric that changes so much at once, for good, has another level from there on."""
T = TypeVar("T", int, str, bool)


@dataclass(frozen=True)
class Record:
    """A run's settings and its steps, in order."""

    settings: Mapping[str, Any]
    """config.yaml as it is."""
    rows: Mapping[int, Mapping[str, float | None]]
    """By step; a metric that was written but is no finite number is None."""
    finished: bool = False
    quiet_s: float = 0.0
    """Time since metrics were last written."""
    checkpoint: str | None = None
    """The newest whole one."""
    _trends: dict[tuple[str, int], Trend] = field(default_factory=dict, repr=False, compare=False)
    _shifts: dict[tuple[str, float], Shift | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def steps(self) -> list[int]:
        """Steps that trained. An evaluation before the first has a row, but is no step."""
        return [step for step, row in self.rows.items() if step > 0 and "time/total" in row]

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
        return [(step, value) for step, row in self.rows.items() if (value := row.get(name)) is not None]

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.points(name)]

    def recent(self, name: str, steps: int = RECENT) -> list[float]:
        return self.values(name)[-steps:]

    def now(self, name: str) -> float | None:
        """Median of the recent steps."""
        values = self.recent(name)
        return median(values) if values else None

    def early(self, name: str) -> float | None:
        """Median of the first steps: at most a quarter of the run, and none after a lasting change of level."""
        values, shift = self.values(name), self.shift(name)
        first = values[: min(EARLY, max(1, len(values) // 4), shift.at if shift else EARLY)]
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
        rows = [row for row in self.rows.values() if row.get(f"time/{phase}") is not None and row.get("time/total")]
        rows = rows[1:] or rows
        total = sum(row["time/total"] or 0.0 for row in rows)
        return sum(row[f"time/{phase}"] or 0.0 for row in rows) / total if total else None

    def span(self, name: str, steps: int = RECENT) -> str:
        """`steps 41 to 60`: where the recent values of a metric come from."""
        places = [step for step, _ in self.points(name)][-steps:]
        return f"step {places[0]}" if len(places) == 1 else f"steps {places[0]} to {places[-1]}"


def read_record(folder: Path, clock: Callable[[], float] = time.time) -> Record:
    """The record of a run folder; a DataError that says what is missing where it is none."""
    if not folder.is_dir():
        found = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"RUN: {folder} {found}. Give the folder of a run, such as runs/NAME-20260101-120000")
    if holder := run_of_checkpoint(folder):
        raise DataError(f"RUN: {folder} is a checkpoint, not a run. Give the run's folder: trimtab doctor {holder}")
    if not (folder / CONFIG).exists():
        raise DataError(f"RUN: {folder} holds no run: it has no {CONFIG}{_meant(folder)}")
    metrics = folder / METRICS_FILE
    with _readable(metrics):
        rows = merge(read_metrics(folder))
        quiet_s = max(0.0, clock() - metrics.stat().st_mtime) if metrics.exists() else 0.0
    done = {int(path.name[5:]) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdigit()}
    record = Record(
        _read_config(folder / CONFIG),
        rows,
        finished=(folder / FINAL).is_dir(),
        quiet_s=quiet_s,
        checkpoint=f"step-{max(done)}" if done else None,
    )
    if not record.steps:
        _refuse_lost(metrics, record)
    return record


def run_of_checkpoint(folder: Path) -> Path | None:
    """The run that a checkpoint's folder belongs to; None where it is none. A checkpoint holds the run's config, too."""
    folder = folder.absolute()
    named = re.fullmatch(r"step-[0-9]+", folder.name) and folder.parent.name == CHECKPOINTS
    run = folder.parent.parent
    return run if named and (run / CONFIG).exists() else None


def merge(lines: Iterable[Any]) -> dict[int, dict[str, float | None]]:
    """Lines of metrics.jsonl as one row a step, in step order."""
    rows: dict[int, dict[str, float | None]] = {}
    for line in lines:
        step = line.get("step") if isinstance(line, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        void = [other for other in rows if other > step]
        if void or (_trained(line) and _trained(rows.get(step, {}))):
            for other in [*void, step]:
                rows.pop(other, None)
        values = {name: _number(value) for name, value in line.items() if name != "step"}
        rows[step] = rows.get(step, {}) | values
    return rows


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


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _trained(row: Mapping[str, Any]) -> bool:
    return "time/total" in row


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        with _readable(path):
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise DataError(f"{path}{place}: YAML cannot be read: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} holds no settings; a run's {CONFIG} has at least model, data and reward")
    return settings


def _meant(folder: Path) -> str:
    """The run above a folder of checkpoints, or one below, for someone who gave the folder of all runs."""
    if folder.absolute().name == CHECKPOINTS and (folder.absolute().parent / CONFIG).exists():
        return f". Did you mean {folder.absolute().parent}?"
    runs = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    return f". Did you mean {folder / runs[-1]}?" if runs else ", which every run writes first"
