"""A run folder as `trimtab watch` follows it: looked at once a second, read again where something changed.

What costs (the doctor's rules, the verdict) is done again only when there are new rows, and then at most for a tenth of the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError
from trimtab.observe.look import RunLook, look_at
from trimtab.observe.verdict import judge
from trimtab.observe.watch.view import RunView, newest_values
from trimtab.observe.web import sections
from trimtab.observe.web.data import damaged
from trimtab.observe.web.facts import head
from trimtab.observe.web.findings import findings_of
from trimtab.observe.web.questions import questions
from trimtab.record.layout import CONFIG, EVENTS_FILE, FINAL, METRICS_FILE, NOW_FILE, PLAN, RUN_FILE

FILES = (METRICS_FILE, NOW_FILE, EVENTS_FILE, RUN_FILE, PLAN, CONFIG, FINAL)
COST_FACTOR = 10
"""A look that took a second is followed by ten without one."""


class RunSource:
    """The newest view of a run, and its samples."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises a DataError where the folder holds no run."""
        self._look = look_at(folder, "trimtab watch", clock)
        self._clock = clock
        self._described: Mapping[str, Any] = {}
        self._seen: tuple[Any, ...] = ()
        self._rest_until = 0.0
        self._last: dict[str, float] = {}
        self._samples: dict[int, list[dict[str, Any]]] = {}
        self.folder = folder
        self.view = RunView()
        self.refresh()

    def refresh(self) -> bool:
        """Look at the files; True where one of them changed. The state is judged anew in any case: it depends on the clock."""
        now = self._clock()
        seen = tuple(_stamp(self.folder / name) for name in FILES)
        changed = seen != self._seen and now >= self._rest_until
        if changed:
            self._seen = seen
            started = time.monotonic()
            self._look.refresh()
            self._described = describe(self._look)
            self._last = newest_values(self._look.reader.metrics)
            self._rest_until = now + COST_FACTOR * (time.monotonic() - started) - 1.0
        run = {**self._described, "state": self._look.state.as_json()}
        self.view = RunView(run, self._look.reader.metrics, self._last, now)
        return changed

    def sample_steps(self) -> list[int]:
        """Steps of which samples were kept."""
        names = (path.stem.removeprefix("step-") for path in (self.folder / "samples").glob("step-*.jsonl"))
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    def samples(self, step: int) -> list[Mapping[str, Any]]:
        """Samples of a step; none where the file cannot be read."""
        if step not in self._samples:
            try:
                found = self._look.reader.samples(step)
            except DataError:
                found = []
            self._samples = {step: found}  # one step's at a time: they may be large
        return list(self._samples[step])


def describe(look: RunLook) -> dict[str, Any]:
    """What the pages show of a run, as far as a terminal or a notebook shows it, too."""
    verdict = judge(look)
    return head(look) | {
        "verdict": verdict.as_json(),
        "questions": questions(look, verdict),
        "phases": sections.phases(look),
        "memory": sections.memory(look),
        "findings": findings_of(look.done.findings),
        "events": sections.events(look),
        "damaged": damaged(look),
    }


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Which file it is, how long, and of when."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
