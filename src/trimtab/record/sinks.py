"""Metrics of every step, to metrics.jsonl and to whatever else is configured.

metrics.jsonl is the record: when `write` returns, its line is out of this process; after a resume it holds the steps up
to the checkpoint and nothing after them, so the file of a run that was killed reads like that of one that was not.
A step may have more than one line (evaluation scores come in their own).
"""

from __future__ import annotations

import io
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, DataError, Problem
from trimtab.base.files import write_file
from trimtab.config.schema import Observe
from trimtab.record.jsonl import append_whole, dump_line, finite, read_jsonl
from trimtab.record.layout import METRICS_FILE
from trimtab.record.tensorboard import EventFile

WANDB_ID_FILE = "wandb-id.txt"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl in file order, each with its `step`. A torn last line is left out; no file, no rows."""
    return read_jsonl(Path(run_dir) / METRICS_FILE)


class Sinks:
    """Where metrics go."""

    def __init__(self, run_dir: Path, observe: Observe, resume_step: int | None) -> None:
        """`resume_step`: the last step that is kept from earlier sessions. None: a new run, nothing is kept."""
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._wandb = _wandb_run(run_dir, observe.wandb, resume_step) if observe.wandb else None
        _keep_until(run_dir / METRICS_FILE, resume_step)
        self._metrics = io.FileIO(run_dir / METRICS_FILE, "a")
        first_step = 0 if resume_step is None else resume_step + 1
        self._events = EventFile(run_dir / "tensorboard", first_step) if observe.tensorboard else None

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Record one step. Values that are not finite are null in metrics.jsonl and are left out elsewhere."""
        row = {name: finite(value) for name, value in metrics.items()}
        append_whole(self._metrics, dump_line({"step": step} | row))
        scalars = {name: value for name, value in row.items() if value is not None}
        if self._events:
            self._events.write(step, scalars)
        if self._wandb:
            self._wandb.log({"step": step} | scalars)

    def flush(self) -> None:
        """metrics.jsonl as far as it is written is on disk, where it outlives the machine's end."""
        os.fsync(self._metrics.fileno())

    def close(self) -> None:
        self._metrics.close()
        if self._events:
            self._events.close()
        if self._wandb:
            self._wandb.finish()


def _keep_until(path: Path, resume_step: int | None) -> None:
    """Drop rows after `resume_step` and a torn last line, so that what is appended next continues a whole file."""
    found = read_jsonl(path)
    for row in found:
        if not isinstance(row.get("step", 0), int | float):
            what = f"a row has the step {str(row['step'])[:60]!r}, which is not a number"
            raise DataError(f"{path}: {what}. Remove the line, or move the file away")
    kept = [row for row in found if resume_step is not None and row.get("step", math.inf) <= resume_step]
    write_file(path, map(dump_line, kept))


def _wandb_run(run_dir: Path, project: str, resume_step: int | None) -> Any:
    """Start or continue the W&B run whose id lies in the run folder.

    Steps are logged as a metric of their own: W&B's counter only rises and would discard what a resumed run repeats.
    """
    try:
        import wandb
    except ImportError as error:
        problem = Problem(
            "observe.wandb",
            "the wandb package is not installed",
            "Install it with: pip install 'trimtab[wandb]', or remove the key",
        )
        raise ConfigError([problem]) from error
    id_file = run_dir / WANDB_ID_FILE
    if resume_step is None or not id_file.exists():
        write_file(id_file, [uuid.uuid4().hex.encode()])
    run = wandb.init(project=project, name=run_dir.name, dir=str(run_dir), id=id_file.read_text(), resume="allow")
    run.define_metric("*", step_metric="step")
    return run
