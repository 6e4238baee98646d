"""The one reader of a run folder, for whoever looks at a run: without torch, and whatever became of the run.

    reader = RunReader(folder)
    reader.update()                        # reads what was appended since the last call, and returns the first row that changed
    steps, rewards = reader.metrics.points("reward/mean")

A run may be running, killed, resumed, or of another version. A torn last line is left for later; other lines that cannot be read
are in `damaged`, and the rest is there. A metrics.jsonl that a resume replaced is read again from its beginning.

Every other file is optional: `run`, `now`, `events`, `distributions`, `sample_index`, `eval_results` and `trace` give what can be
read and nothing where there is nothing; lines of them that cannot be read are in `damaged_elsewhere`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from trimtab.base.errors import DataError, first_line
from trimtab.record.columns import MetricTable
from trimtab.record.jsonl import Damaged, JsonlTail, read_jsonl
from trimtab.record.layout import (
    CHECKPOINTS,
    CONFIG,
    DISTRIBUTIONS_FILE,
    EVENTS_FILE,
    FINAL,
    METRICS_FILE,
    NOW_FILE,
    PLAN,
    RUN_FILE,
    SAMPLE_INDEX,
    TRACE_FILE,
    eval_results_file,
    eval_samples_file,
    samples_file,
)


class RunReader:
    """What a run folder holds now, and, after each `update`, what its metrics have become."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.metrics = MetricTable()
        self._tail = JsonlTail(self.folder / METRICS_FILE)
        self._damaged: dict[Path, list[Damaged]] = {}

    def update(self) -> int | None:
        """Read what was appended to metrics.jsonl; returns the index of the first row that is new or different, or None.

        A file that is not there has no rows."""
        with readable(self._tail.path):
            replaced, lines = self._tail.read()
        if replaced:
            self.metrics = MetricTable()
        known = self.metrics.extend(lines)
        return known if replaced or known < len(self.metrics) else None

    @property
    def offset(self) -> int:
        """Bytes of metrics.jsonl read so far."""
        return self._tail.offset

    @property
    def damaged(self) -> Sequence[Damaged]:
        """Lines of metrics.jsonl that cannot be read."""
        return self._tail.damaged

    def refuse_damaged(self) -> None:
        """For whoever needs every row."""
        if self.damaged:
            raise self.damaged[0].error()

    @property
    def finished(self) -> bool:
        return (self.folder / FINAL).is_dir()

    @property
    def checkpoint_steps(self) -> list[int]:
        """Steps of the whole checkpoints."""
        names = (path.name.removeprefix("step-") for path in self.folder.glob(f"{CHECKPOINTS}/step-*"))
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    def quiet_s(self, clock: Callable[[], float] = time.time) -> float:
        """Time since metrics were last written; 0 where there are none."""
        path = self._tail.path
        with readable(path):
            return max(0.0, clock() - path.stat().st_mtime) if path.exists() else 0.0

    def settings(self) -> Mapping[str, Any]:
        """config.yaml as it is."""
        return _read_settings(self.folder / CONFIG)

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Completions that were kept of a training step; none where there is no file."""
        return read_jsonl(samples_file(self.folder, step))

    def eval_samples(self, step: int) -> list[dict[str, Any]]:
        """Completions that were kept of the evaluation after a step; none where there is no file."""
        return read_jsonl(eval_samples_file(self.folder, step))

    def run(self) -> dict[str, Any]:
        """run.json: facts of the run, its starts and its state; empty where there is none."""
        return read_object(self.folder / RUN_FILE)

    def now(self) -> dict[str, Any]:
        """now.json: what it does, or did last; empty where there is none."""
        return read_object(self.folder / NOW_FILE)

    def plan(self) -> dict[str, Any]:
        """plan.json; empty where there is none."""
        return read_object(self.folder / PLAN)

    def events(self) -> list[dict[str, Any]]:
        """What happened, in the order of the file. A resume takes nothing out."""
        return self._lines(self.folder / EVENTS_FILE)

    def distributions(self) -> list[dict[str, Any]]:
        """Histograms of each step, in step order; of a step that was repeated, the last."""
        return _last_of_each(self._lines(self.folder / DISTRIBUTIONS_FILE), ("step",))

    def sample_index(self) -> list[dict[str, Any]]:
        """What files of samples there are, by kind and step; of one that was written again, the last."""
        return _last_of_each(self._lines(self.folder / SAMPLE_INDEX), ("kind", "step"))

    def eval_results(self, step: int) -> list[dict[str, Any]]:
        """The outcome of every prompt in the evaluation after a step; none where there is no file."""
        return self._lines(eval_results_file(self.folder, step))

    def trace(self) -> list[dict[str, Any]]:
        """Events of trace.json, in Chrome's format, as far as they can be read."""
        return list(read_trace(self.folder / TRACE_FILE))

    @property
    def damaged_elsewhere(self) -> list[Damaged]:
        """Lines that could not be read when these files were last asked for."""
        return [line for lines in self._damaged.values() for line in lines]

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        tail = JsonlTail(path)
        with readable(path):
            _, rows = tail.read()
        self._damaged[path] = tail.damaged
        return rows


def open_run(folder: Path, command: str = "trimtab doctor") -> RunReader:
    """A reader that has read all there is; a DataError that says what is wrong where the folder holds no run."""
    if not folder.is_dir():
        found = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"RUN: {folder} {found}. Give the folder of a run, such as runs/NAME-20260101-120000")
    if holder := run_of_checkpoint(folder):
        raise DataError(f"RUN: {folder} is a checkpoint, not a run. Give the run's folder: {command} {holder}")
    if not (folder / CONFIG).exists():
        raise DataError(f"RUN: {folder} holds no run: it has no {CONFIG}{_meant(folder)}")
    reader = RunReader(folder)
    reader.update()
    return reader


def run_of_checkpoint(folder: Path) -> Path | None:
    """The run that a checkpoint's folder belongs to; None where it is none. A checkpoint holds the run's config, too."""
    folder = folder.absolute()
    named = re.fullmatch(r"step-[0-9]+", folder.name) and folder.parent.name == CHECKPOINTS
    run = folder.parent.parent
    return run if named and (run / CONFIG).exists() else None


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """A DataError where the file cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A file with one JSON object; empty where it is missing, damaged or something else. Whoever replaces it does so whole."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_trace(path: Path) -> Iterator[dict[str, Any]]:
    """One event a line; the array around them is never closed, and the last line may be torn."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for line in file:
            text = line.strip().lstrip(b"[,").rstrip(b",]")
            try:
                event = json.loads(text) if text else None
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


def _last_of_each(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """The last row of each key, in step order; rows without a step are left out."""
    found = {tuple(str(row.get(key)) for key in keys): row for row in rows if type(row.get("step")) is int}
    return sorted(found.values(), key=lambda row: row["step"])


def _read_settings(path: Path) -> Mapping[str, Any]:
    try:
        with readable(path):
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise DataError(f"{path}{place}: YAML cannot be read: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as YAML: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path} holds no settings; the {CONFIG} of a run has at least model, data and reward")
    return settings


def _meant(folder: Path) -> str:
    """The run above a folder of checkpoints, or one below, for someone who gave the folder of all runs."""
    if folder.absolute().name == CHECKPOINTS and (folder.absolute().parent / CONFIG).exists():
        return f". Did you mean {folder.absolute().parent}?"
    runs = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    return f". Did you mean {folder / runs[-1]}?" if runs else ", which every run writes first"
