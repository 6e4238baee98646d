"""RUN/trace.json, in Chrome's JSON array format, one event a line.

The array is never closed: Perfetto and Chrome accept that, so the file opens after a kill too. A separating comma leads its line,
so the file plus "]" is plain JSON. A resumed run appends; timestamps are wall clock, so sessions lie one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.base.spans import CounterValue

PHASES_TRACK, EVENTS_TRACK, CHECKPOINTS_TRACK = "phases", "events", "checkpoints"
TRACKS = (PHASES_TRACK, EVENTS_TRACK, CHECKPOINTS_TRACK, "engine", "update", "rewards", "environments")
"""Their numbers are their places, from 1; any other is numbered as it comes."""
COUNTER_TRACK = 0


class TracedSpan(NamedTuple):
    """A span on its way into the file. Seconds of the timeline's clock."""

    track: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]


class TraceFile:
    """`offset`: from the clock of spans to Unix seconds."""

    def __init__(self, path: Path, offset: float) -> None:
        self._offset = offset
        self._numbers = {name: number for number, name in enumerate(TRACKS, 1)}
        self._named = set(TRACKS)
        self._file = _open_trace(path)

    def write(self, spans: Iterable[TracedSpan], counters: Iterable[CounterValue] = ()) -> None:
        """Append, and hand it to the system."""
        events = [event for span in spans for event in self._events(span)]
        for value in counters:
            at = self._microseconds(value.at)
            held = {"name": value.name, "ph": "C", "ts": at, "pid": 1, "tid": COUNTER_TRACK}
            events.append({**held, "args": {"value": value.value}})
        self._file.write("".join(f",{json.dumps(event, default=str)}\n" for event in events).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def _events(self, span: TracedSpan) -> list[dict[str, Any]]:
        number = self._numbers.setdefault(span.track, len(self._numbers) + 1)
        begin, end = self._microseconds(span.begin), self._microseconds(span.end)
        event = {
            "name": span.name, "ph": "X", "ts": begin, "dur": max(0, end - begin), "pid": 1, "tid": number, "args": span.args,
        }  # fmt: skip
        if span.track in self._named:
            return [event]
        self._named.add(span.track)
        return [_name_of(span.track, number), event]

    def _microseconds(self, at: float) -> int:
        return round((at + self._offset) * 1e6)


def _name_of(track: str, number: int) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}


def _open_trace(path: Path) -> Any:
    """Open for appending after the last whole line; a new (or headless) file gets the header that names the tracks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("r+b" if path.exists() else "w+b")
    whole = file.read().rfind(b"\n") + 1
    header = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "trimtab"}},
        *(_name_of(track, number) for number, track in enumerate(TRACKS, 1)),
    ]
    head = ("[" + ",\n".join(json.dumps(event) for event in header)).encode()
    file.seek(whole)
    if whole <= len(head):
        file.seek(0)
        file.write(head + b"\n")
    file.truncate()
    file.flush()
    file.seek(0, os.SEEK_END)
    return file
