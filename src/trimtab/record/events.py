"""RUN/events.jsonl: what happened in a run, one line for each event, in the order it happened. Nothing is ever taken out.

An event never fails whoever reports it: a line that cannot be written (a full disk) waits, and `settle`, at the end of a step,
raises what kept it. Events from before there is a run folder wait, too. A kill may tear the last line; the next session removes
it.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from trimtab.base.errors import cut
from trimtab.record.jsonl import append_whole, dump_line
from trimtab.record.layout import EVENTS_FILE

Level = Literal["info", "warn", "error"]
MAX_WAITING = 1000
"""Events that wait to be written; the oldest go first."""


class EventLog:
    """Any thread may add."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._file: io.FileIO | None = None
        self._error: OSError | None = None
        self._lock = threading.RLock()
        self.step: int | None = None
        """The step under way: of events that do not say another."""

    def open(self, folder: Path) -> None:
        """From here on events are written, those that waited first."""
        with self._lock:
            self._file = open_whole_lines(folder / EVENTS_FILE)
            self._write()

    def add(
        self, level: Level, kind: str, text: str, data: Mapping[str, Any] | None = None, step: int | None = None
    ) -> None:
        event = {
            "at": round(self._clock(), 3),
            "step": self.step if step is None else step,
            "level": level,
            "kind": kind,
            "text": cut(text),
            "data": dict(data or {}),
        }
        with self._lock:
            self._waiting.append(dump_line(event))
            self._write()

    def settle(self) -> None:
        """All events are written; raises what keeps them from that."""
        with self._lock:
            self._write()
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            while self._waiting:
                append_whole(self._file, self._waiting[0])
                self._waiting.popleft()
            self._error = None
        except OSError as error:
            self._error = error


def open_whole_lines(path: Path) -> io.FileIO:
    """Open a file of lines for appending; a torn last line is cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.FileIO(path, "a+")
    end = file.seek(0, os.SEEK_END)
    step = 4096
    at = end
    while at > 0:
        start = max(0, at - step)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            file.truncate(start + found + 1)
            return file
        at = start
    file.truncate(0)
    return file
