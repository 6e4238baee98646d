"""What this process does within a phase: spans and counters for the trace, and how far it has come. Free where nobody listens.

Whoever works (an engine, an updater, a pool of workers) says so here; whoever observes the run takes it at the end of a step
(observe/timeline.py, observe/pulse.py). One log a process, as one run a process. Seconds are those of `time.perf_counter`, which
all processes of a machine share on Linux, so spans of ranks fit the driver's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

MAX_SPANS = 4_000
"""Spans, and values of counters, that are kept of a step; the others are counted."""


class Span(NamedTuple):
    """Something that took time."""

    track: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]


class CounterValue(NamedTuple):
    """How much there was of something, from this moment on."""

    name: str
    at: float
    value: float


@dataclass
class Taken:
    """What was logged since the last time."""

    spans: list[Span] = field(default_factory=list)
    counters: list[CounterValue] = field(default_factory=list)
    left_out: int = 0


class SpanLog:
    """`on`: somebody takes what is logged. Adding is safe from any thread."""

    def __init__(self) -> None:
        self.on = False
        self._taken = Taken()
        self.progress: tuple[int, int | None, str] | None = None
        """Done, how many there are, and what is counted."""

    def add(self, track: str, name: str, begin: float, end: float, **args: Any) -> None:
        if not self.on:
            return
        if len(self._taken.spans) < MAX_SPANS:
            self._taken.spans.append(Span(track, name, begin, end, args))
        else:
            self._taken.left_out += 1

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """The block is a span, unless it raises."""
        begin = perf_counter()
        yield
        self.add(track, name, begin, perf_counter(), **args)

    def count(self, name: str, at: float, value: float) -> None:
        if self.on and len(self._taken.counters) < MAX_SPANS:
            self._taken.counters.append(CounterValue(name, at, value))

    def take(self) -> Taken:
        taken, self._taken = self._taken, Taken()
        return taken

    @property
    def logged(self) -> int:
        """Spans since the last `take`: it changes while work goes on."""
        taken = self._taken
        return len(taken.spans) + taken.left_out

    def forget(self) -> None:
        """Nobody listens any more."""
        self.on, self.progress = False, None
        self._taken = Taken()


log = SpanLog()
"""The log of this process."""
