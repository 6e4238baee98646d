"""What a page shows of a run, and what Prometheus gets of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from trimtab.observe.web.server import judged
from trimtab.observe.web.server.heads import Heads, newest
from trimtab.observe.web.server.kept import Kept, Made, stamp
from trimtab.observe.web.server.looks import Looks
from trimtab.observe.web.server.stream import live_id
from trimtab.record.columns import STEP
from trimtab.record.layout import METRICS_FILE, RUN_FILE
from trimtab.record.prometheus import LastRow
from trimtab.record.reader import read_object

TAIL_BYTES = 64 << 10
MAX_RUNS_KEPT = 16


class Pages:
    """Heads, whole runs and last rows. Every function may be called from several threads."""

    def __init__(self, looks: Looks, clock: Callable[[], float] = time.monotonic) -> None:
        self._looks, self._clock = looks, clock
        self._heads, self._runs = Heads(clock), Kept(MAX_RUNS_KEPT, clock)

    def heads(self, runs: Mapping[str, Path]) -> list[Made]:
        return self._heads.list(runs)

    def run(self, id: str, folder: Path) -> Made:
        """All of a run but its columns, and the place from which its stream goes on."""
        held = self._runs.get(id, folder)
        if held is not None:
            return held
        before, live = stamp(folder), live_id(folder)
        made = self._looks.ask(folder, lambda look: judged.page_of(look, id))
        return self._runs.put(id, before, made | {"live": live})

    def last_rows(self, runs: Mapping[str, Path]) -> Iterable[LastRow]:
        """For Prometheus."""
        return [last_row(id, folder) for id, folder in runs.items()]


def last_row(id: str, folder: Path) -> LastRow:
    row, facts = newest(folder, TAIL_BYTES), read_object(folder / RUN_FILE)
    metrics = {name: value for name, value in row.items() if name != STEP and type(value) in (int, float)}
    step, at = row.get(STEP), row.get("time/at")
    if at is None and row:
        at = _time_of(folder / METRICS_FILE)
    info = {
        key: str(facts[key]) for key in ("stage", "name", "state", "trimtab", "host") if isinstance(facts.get(key), str)
    }
    return LastRow(id, step if type(step) is int else None, at, metrics, info)


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
