"""One look at a run folder, for every view: the reader, what the doctor finds, and in what state the run is. Without torch.

    look = look_at(folder)
    look.refresh()                  # reads what was appended since; True where something is new

A file that is missing or damaged leaves its part empty: old, half-written and damaged folders open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError
from trimtab.observe.doctor.examine import Examination, examine
from trimtab.observe.doctor.record import Record, record_of
from trimtab.observe.state import Signs, StateNow, state_of
from trimtab.record.jsonl import finite
from trimtab.record.layout import METRICS_FILE, run_name
from trimtab.record.reader import RunReader, open_run

STAGES = {"sft": "sft", "reward-model": "reward_model", "reward_model": "reward_model"}


class RunLook:
    """What is known of a run. Everything is read when it is first asked for, and again after `refresh`."""

    def __init__(self, reader: RunReader, clock: Callable[[], float] = time.time) -> None:
        self.reader, self.clock = reader, clock
        self.folder = reader.folder

    def refresh(self) -> bool:
        """Forget all but the metrics, and read what was appended to them; True where rows changed."""
        changed = self.reader.update() is not None
        for name in ("settings", "run", "now", "plan", "record", "done", "events", "step_seconds"):
            self.__dict__.pop(name, None)
        return changed

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        try:
            return self.reader.settings()
        except DataError:
            return {}

    @cached_property
    def run(self) -> dict[str, Any]:
        return self.reader.run()

    @cached_property
    def now(self) -> dict[str, Any]:
        return self.reader.now()

    @cached_property
    def plan(self) -> dict[str, Any]:
        return self.reader.plan()

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return self.reader.events()

    @cached_property
    def record(self) -> Record:
        return record_of(self.reader, self.settings, self.clock)

    @cached_property
    def done(self) -> Examination:
        """What the doctor's rules say."""
        return examine(self.record)

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        return tuple(self.record.values("time/total"))

    @property
    def stage(self) -> str:
        """`rl`, `sft` or `reward_model`."""
        said = str(self.run.get("stage") or self.settings.get("stage") or "rl")
        return STAGES.get(said, "rl")

    @property
    def name(self) -> str:
        return str(self.run.get("name") or run_name(self.folder))

    @property
    def steps(self) -> int | None:
        """Steps that the run is to have."""
        for value in (self.run.get("steps"), self.record.setting("learn.steps", 0), self.now.get("steps")):
            known = finite(value)
            if known:
                return int(known)
        return None

    @property
    def state(self) -> StateNow:
        record = self.record
        rows = self.folder / METRICS_FILE
        try:
            written = rows.stat().st_mtime if len(self.reader.metrics) else None
        except OSError:
            written = None
        signs = Signs(
            run=self.run,
            now=self.now,
            final=self.reader.finished,
            step=record.steps[-1] if record.steps else 0,
            steps=self.steps,
            step_seconds=self.step_seconds,
            last_row_at=written,
        )
        return state_of(signs, self.clock())


def look_at(folder: Path, command: str = "trimtab report", clock: Callable[[], float] = time.time) -> RunLook:
    """A look at a run folder; a DataError that says what is wrong where it holds no run."""
    return RunLook(open_run(Path(folder), command), clock)
