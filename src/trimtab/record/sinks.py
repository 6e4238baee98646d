"""Metrics of every step, to metrics.jsonl and to whatever else is configured.

metrics.jsonl is the record: when `write` returns, its line is out of this process; after a resume it holds the steps up
to the checkpoint and nothing after them, so the file of a run that was killed reads like that of one that was not.
A step may have more than one line (evaluation scores come in their own).
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError
from trimtab.base.files import write_file
from trimtab.config.schema import Observe
from trimtab.record.jsonl import append_whole, dump_line, finite, read_jsonl
from trimtab.record.layout import METRICS_FILE
from trimtab.record.prometheus import PrometheusPort
from trimtab.record.tensorboard import EventFile
from trimtab.record.trackers import Trackers


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl in file order, each with its `step`. A torn last line is left out; no file, no rows."""
    return read_jsonl(Path(run_dir) / METRICS_FILE)


class Sinks:
    """Where metrics go."""

    def __init__(self, run_dir: Path, observe: Observe, resume_step: int | None) -> None:
        """`resume_step`: the last step that is kept from earlier sessions. None: a new run, nothing is kept."""
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._trackers = Trackers(run_dir, observe, resume_step)
        _keep_until(run_dir / METRICS_FILE, resume_step)
        self._metrics = io.FileIO(run_dir / METRICS_FILE, "a")
        first_step = 0 if resume_step is None else resume_step + 1
        self._events = EventFile(run_dir / "tensorboard", first_step) if observe.tensorboard else None
        port, host = observe.prometheus, observe.prometheus_host
        self._prometheus = PrometheusPort(port, host, run_dir.name) if port is not None else None

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record one step. Values that are not finite are null in metrics.jsonl and are left out elsewhere."""
        row = {name: finite(value) for name, value in metrics.items()}
        append_whole(self._metrics, dump_line({"step": step} | row))
        scalars = {name: value for name, value in row.items() if value is not None}
        if self._events:
            self._events.write(step, scalars)
        self._trackers.write(step, scalars)
        if self._prometheus:
            self._prometheus.write(step, scalars)

    @property
    def wants_report(self) -> bool:
        """Whether the report of a finished run goes somewhere."""
        return self._trackers.any

    def attach(self, report: Path) -> None:
        self._trackers.attach(report)

    def flush(self) -> None:
        """metrics.jsonl as far as it is written is on disk, where it outlives the machine's end."""
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        self._metrics.close()
        if self._events:
            self._events.close()
        self._trackers.close()
        if self._prometheus:
            self._prometheus.close()


def _keep_until(path: Path, resume_step: int | None) -> None:
    """Drop rows after `resume_step` and a torn last line, so that what is appended next continues a whole file."""
    found = read_jsonl(path)
    for row in found:
        if not isinstance(row.get("step", 0), int | float):
            what = f"a row has the step {str(row['step'])[:60]!r}, which is not a number"
            raise DataError(f"{path}: {what}. Remove the line, or move the file away")
    kept = [row for row in found if resume_step is not None and row.get("step", math.inf) <= resume_step]
    write_file(path, map(dump_line, kept))
