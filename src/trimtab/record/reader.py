"""The one reader of a run folder, for whoever looks at a run: without torch, and whatever became of the run.

    reader = RunReader(folder)
    reader.update()                        # reads what was appended since the last call, and returns the first row that changed
    steps, rewards = reader.metrics.points("reward/mean")

A run may be running, killed, resumed, or of another version. A torn last line is left for later; other lines that cannot be read
are in `damaged`, and the rest is there. A metrics.jsonl that a resume replaced is read again from its beginning.
"""

from __future__ import annotations

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
from trimtab.record.layout import CHECKPOINTS, CONFIG, FINAL, METRICS_FILE, eval_samples_file, samples_file


class RunReader:
    """What a run folder holds now, and, after each `update`, what its metrics have become."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.metrics = MetricTable()
        self._tail = JsonlTail(self.folder / METRICS_FILE)

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
