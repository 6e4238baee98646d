"""`trimtab watch` where there is no terminal: a line a step, warnings as they come, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from trimtab.observe.format import get
from trimtab.observe.history import History
from trimtab.observe.panel import step_line
from trimtab.observe.visible import visible
from trimtab.observe.watch.sections import event_line, verdict_lines
from trimtab.observe.watch.source import RunSource
from trimtab.observe.watch.view import RunView
from trimtab.record.columns import TRAINED

LOOK_S = 1.0
WIDTH = 120


class StepPrinter:
    """Prints every step once, in order; steps that a resume repeats are printed again."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._events = 0
        self._printed: list[tuple[int, float]] = []
        """Step and seconds of each row: a row that was repeated took another time."""

    def show(self, view: RunView) -> None:
        metrics, steps = view.metrics, view.metrics.steps
        rows = list(zip(steps.tolist(), np.nan_to_num(metrics.column(TRAINED), nan=-1.0).tolist()))
        known = next((at for at, (new, old) in enumerate(zip(rows, self._printed)) if new != old), None)
        known = min(len(rows), len(self._printed)) if known is None else known
        if known < len(rows):
            trained = metrics.written(TRAINED)
            columns = {name: metrics.column(name) for name in metrics.names}
            history = History(int(get(view.facts, "steps") or steps[-1]))
            for row in range(len(steps)):
                if trained[row]:
                    history.add(int(steps[row]), _row(columns, row))
                    if row >= known:
                        self._print(step_line(history))
        self._printed = rows
        events = view.rows("events")
        for event in events[self._events :]:
            if event.get("level") in ("warn", "error"):
                self._print(event_line(event).plain)
        self._events = len(events)

    def end(self, view: RunView) -> None:
        for line in verdict_lines(view, WIDTH, 6):
            self._print(line.plain)

    def _print(self, text: str) -> None:
        print(visible(text), file=self._out, flush=True)


def _row(columns: Mapping[str, Any], row: int) -> dict[str, float]:
    return {name: float(values[row]) for name, values in columns.items() if np.isfinite(values[row])}


def follow(source: RunSource, out: IO[str], stay: bool, sleep: Callable[[float], None] = time.sleep) -> None:
    """Print until the run ends; with `stay`, for ever."""
    lines = StepPrinter(out)
    lines.show(source.view)
    while stay or not source.view.has_ended:
        sleep(LOOK_S)
        if source.refresh():
            lines.show(source.view)
    lines.end(source.view)
