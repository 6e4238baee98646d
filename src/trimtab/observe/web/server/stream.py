"""The events of a run as they happen, as server-sent events: `rows`, `now`, `event`, `restart`.

Files are looked at once a second while somebody reads the stream, by size, time and inode: change notification does not work on
network file systems. An event's id is the place reached in metrics.jsonl and events.jsonl, so a browser that has lost the
connection goes on where it was. A metrics.jsonl that a resume replaced sends `restart`, and then its rows from the first on.

A step may have several lines, such as its own and its evaluation's: each row that is sent holds all of its step so far.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.observe.web.server.files import inside
from trimtab.observe.web.server.tail import LineTail, parse_line, parse_mark
from trimtab.observe.web.server.threads import Threads
from trimtab.record.columns import STEP, TRAINED
from trimtab.record.jsonl import dump_line
from trimtab.record.layout import EVENTS_FILE, METRICS_FILE

POLL_S = 1.0
STOP_CHECK_S = 0.1
"""How often a stream looks whether the server ends."""
HEARTBEAT_S = 15.0
"""A stream that has nothing to say writes a comment this often, so that a connection that is gone is noticed."""
OVERLAP_BYTES = 64 << 10
"""Bytes of metrics.jsonl, before its end, that a stream without a place starts at: rows that the page may have already."""
StateOf = Callable[[], Mapping[str, Any]]


def live_id(run: Path) -> str:
    """The place that a stream would go on from, for a page that reads all of a run now."""
    rows, events = LineTail(run / METRICS_FILE), LineTail(run / EVENTS_FILE)
    rows.to_end()
    events.to_end()
    return f"{rows.mark}_{events.mark}"


class Poll:
    """What is new since the last look."""

    def __init__(self, run: Path, root: Path, state: StateOf, after: str | None) -> None:
        self._run, self._root, self._state = run, root, state
        marks = [parse_mark(part) for part in (after or "").split("_")]
        known = [mark for mark in marks if mark is not None]
        self.rows, self.events = LineTail(run / METRICS_FILE), LineTail(run / EVENTS_FILE)
        if len(known) == 2:
            self.rows.mark, self.events.mark = known
        else:
            self.rows.to_end(OVERLAP_BYTES)
            self.events.to_end()
        self._last_state: Mapping[str, Any] | None = None
        self._last_row: dict[str, Any] = {}
        self._merged(self.rows.lines_before(OVERLAP_BYTES))

    @property
    def id(self) -> str:
        return f"{self.rows.mark}_{self.events.mark}"

    def next(self) -> tuple[bool, bytes]:
        """Whether there is more to read at once, and what to send now."""
        if not all(inside(self._run / name, self._root) for name in (METRICS_FILE, EVENTS_FILE)):
            return False, b""
        before = self.rows.mark
        void, lines = self.rows.read()
        sent = self._message("restart", {}) if void else b""
        self._last_row = {} if void else self._last_row
        if rows := self._merged(lines):
            start = 0 if void else before.offset
            sent += self._message("rows", {"from": start, "until": self.rows.mark.offset, "rows": rows})
        _, events = self.events.read()
        for event in map(parse_line, events):
            if event is not None:
                sent += self._message("event", event)
        state = self._state()
        if state != self._last_state:
            self._last_state = state
            sent += self._message("now", state)
        return len(lines) > 0 or len(events) > 0, sent

    def _merged(self, lines: Sequence[bytes]) -> list[dict[str, Any]]:
        """A row for each step, with what earlier lines of the step had."""
        rows: list[dict[str, Any]] = []
        for line in lines:
            row = parse_line(line)
            if row is None or type(row.get(STEP)) is not int:
                continue
            if row[STEP] == self._last_row.get(STEP) and not (TRAINED in row and TRAINED in self._last_row):
                row = self._last_row | row
                if rows:
                    rows.pop()
            rows.append(row)
            self._last_row = row
        return rows

    def _message(self, name: str, data: Mapping[str, Any]) -> bytes:
        return f"id: {self.id}\nevent: {name}\ndata: ".encode() + dump_line(data) + b"\n"


async def stream(poll: Poll, threads: Threads, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Messages until the server ends. `ended` must be uvicorn's own flag: only that is set at Ctrl-C."""
    yield b"retry: 1000\n\n"
    written = time.monotonic()
    while not ended():
        more, sent = await threads.run(poll.next)
        if not sent and time.monotonic() - written >= HEARTBEAT_S:
            sent = b": still here\n\n"
        if sent:
            yield sent
            written = time.monotonic()
        wake = time.monotonic() + (0.0 if more else POLL_S)
        while time.monotonic() < wake and not ended():
            await asyncio.sleep(STOP_CHECK_S)
