"""What a page shows of runs, kept while their files stay as they are: reading and judging a run takes longer than asking for it.

A list of runs is answered in about a second, whatever there is: runs that could not be judged until then come with what their
last lines say, and are judged when the list is asked for again."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trimtab.base.errors import TrimtabError
from trimtab.observe.web.server import judged
from trimtab.observe.web.server.looks import Looks
from trimtab.observe.web.server.stream import live_id
from trimtab.observe.web.server.tail import LineTail, parse_line
from trimtab.record.columns import STEP
from trimtab.record.layout import CONFIG, EVENTS_FILE, METRICS_FILE, NOW_FILE, PLAN, RUN_FILE
from trimtab.record.prometheus import LastRow
from trimtab.record.reader import read_object

WATCHED = (METRICS_FILE, RUN_FILE, NOW_FILE, EVENTS_FILE, CONFIG, PLAN)
"""Files that decide what a page shows. One that changes makes what was kept old."""
LIST_SECONDS = 0.6
STATE_SECONDS = 5.0
"""What is kept of a run that goes on is older than this at most: also without new lines it may have become quiet."""
TAIL_BYTES = 64 << 10
MAX_RUNS_KEPT = 16
Made = dict[str, Any]


class Kept:
    """Results by key, each as long as a run's files are the same. The least recently used go first."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock, self._lock = most, clock, threading.Lock()
        self._held: OrderedDict[str, tuple[object, float, Made]] = OrderedDict()

    def get(self, key: str, folder: Path) -> Made | None:
        with self._lock:
            held = self._held.get(key)
        if held is None or held[0] != stamp(folder):
            return None
        fresh = _ended(held[2]) or self._clock() - held[1] < STATE_SECONDS
        return held[2] if fresh else None

    def put(self, key: str, before: object, made: Made) -> Made:
        """`before`: the files' stamp before they were read: a line that came while they were makes what was read old."""
        with self._lock:
            self._held[key] = (before, self._clock(), made)
            self._held.move_to_end(key)
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        return made


def stamp(folder: Path) -> object:
    """Size, time and inode of the files that decide."""
    found = []
    for name in WATCHED:
        try:
            state = (folder / name).stat()
            found.append((state.st_size, state.st_mtime_ns, state.st_ino))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


def _ended(made: Made) -> bool:
    state = made.get("state")
    return isinstance(state, Mapping) and state.get("kind") in ("finished", "failed", "stopped")


class Pages:
    """Heads, whole runs and last rows. Every function may be called from several threads."""

    def __init__(self, looks: Looks, clock: Callable[[], float] = time.monotonic) -> None:
        self._looks, self._clock = looks, clock
        self._heads, self._runs = Kept(10_000, clock), Kept(MAX_RUNS_KEPT, clock)

    def heads(self, runs: Mapping[str, Path]) -> list[Made]:
        end = self._clock() + LIST_SECONDS
        return [self._head(id, folder, in_time=self._clock() < end) for id, folder in runs.items()]

    def _head(self, id: str, folder: Path, in_time: bool) -> Made:
        held = self._heads.get(id, folder)
        if held is not None:
            return held
        if not in_time:
            return cheap_head(id, folder)
        before = stamp(folder)
        try:
            made = judged.head_of(folder, id)
        except (TrimtabError, OSError) as error:
            made = cheap_head(id, folder) | {"error": str(error)}
        return self._heads.put(id, before, made)

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


def cheap_head(id: str, folder: Path) -> Made:
    """What a run's small files and its last lines say, without a verdict."""
    row, facts = _newest(folder), read_object(folder / RUN_FILE)
    seconds = row.get("time/total")
    last = {
        "reward": row.get("reward/mean"),
        "score": row.get("eval/pass@1"),
        "seconds_a_step": seconds,
        "peak_gib": None,
    }
    kind = facts.get("state") if isinstance(facts.get("state"), str) else "running"
    state = {"kind": kind, "text": ""}
    return {
        "id": id,
        "name": folder.name,
        "state": state,
        "stage": facts.get("stage", "rl"),
        "facts": {"step": row.get(STEP), "steps": facts.get("steps"), "seed": facts.get("seed")},
        "level": "unknown",
        "findings": 0,
        "last": last,
        "at": row.get("time/at"),
        "partial": True,
    }


def last_row(id: str, folder: Path) -> LastRow:
    row, facts = _newest(folder), read_object(folder / RUN_FILE)
    metrics = {name: value for name, value in row.items() if name != STEP and type(value) in (int, float)}
    step, at = row.get(STEP), row.get("time/at")
    if at is None and row:
        at = _time_of(folder / METRICS_FILE)
    info = {
        key: str(facts[key]) for key in ("stage", "name", "state", "trimtab", "host") if isinstance(facts.get(key), str)
    }
    return LastRow(id, step if type(step) is int else None, at, metrics, info)


def _newest(folder: Path) -> Made:
    """The newest value of each metric in the last lines."""
    tail = LineTail(folder / METRICS_FILE)
    tail.to_end()
    merged: Made = {}
    for line in tail.lines_before(TAIL_BYTES):
        merged |= parse_line(line) or {}
    return merged


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
