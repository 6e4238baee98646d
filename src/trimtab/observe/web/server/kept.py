"""What was read of runs, kept while their files stay as they are: reading and judging a run takes longer than asking for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.record.layout import CONFIG, EVENTS_FILE, METRICS_FILE, PLAN, RUN_FILE

WATCHED = (METRICS_FILE, RUN_FILE, EVENTS_FILE, CONFIG, PLAN)
"""Files that decide what a page shows. One that changes makes what was kept old. now.json changes every second."""
STATE_SECONDS = 5.0
"""What is kept of a run that goes on is older than this at most: also without new lines it may have become quiet."""
Made = dict[str, Any]


class Kept:
    """Results by key, each as long as a run's files are the same. The least recently used go first."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock, self._lock = most, clock, threading.Lock()
        self._held: OrderedDict[str, tuple[object, float, Made]] = OrderedDict()

    def get(self, key: str, folder: Path) -> Made | None:
        """What is held, if it is not old."""
        with self._lock:
            held = self._held.get(key)
        if held is None or held[0] != stamp(folder):
            return None
        fresh = _ended(held[2]) or self._clock() - held[1] < STATE_SECONDS
        return held[2] if fresh else None

    def get_old(self, key: str) -> Made | None:
        """What is held, old or not."""
        with self._lock:
            held = self._held.get(key)
        return held[2] if held else None

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
