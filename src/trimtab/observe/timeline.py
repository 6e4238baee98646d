"""Where the seconds of a step go: every second of wall time belongs to exactly one phase or to idle.

Phases do not nest and do not outlive their step, so `time/total` = sum of `time/<phase>` + `time/idle` by construction.
The same spans go to RUN/trace.json in Chrome's JSON array format, one event a line, flushed at each step. The array is
never closed: Perfetto and Chrome accept that, so the file opens after a kill too. A separating comma leads its line, so
the file plus "]" is plain JSON. A resumed run appends; timestamps are wall clock, so sessions lie one after the other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PHASES = ("rollout", "reward", "score", "update", "publish", "checkpoint", "eval")
PHASE_TRACK, EVENT_TRACK, CHECKPOINT_TRACK = 1, 2, 3


class Timeline:
    """Measures phases; the first step counts from construction, so construct it where the loop starts."""

    def __init__(
        self,
        run_dir: Path,
        on_phase: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self._epoch_offset = wall_clock() - clock()
        self._on_phase = on_phase
        self._open_phase: str | None = None
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._pending: list[str] = []
        self._file = _open_trace(Path(run_dir) / "trace.json")
        self._step_start = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block's time is `name`'s. A phase entered twice in a step adds up."""
        assert name in PHASES, f"unknown phase {name!r}; phases are {', '.join(PHASES)}"
        assert self._open_phase is None, f"phase {name!r} opened inside {self._open_phase!r}; phases do not nest"
        self._open_phase = name
        if self._on_phase:
            self._on_phase(name)
        start = self.clock()
        try:
            yield
        finally:
            end = self.clock()
            self._open_phase = None
            self._seconds[name] += end - start
            self._span(name, start, end, PHASE_TRACK, {})

    def event(self, name: str, start: float, end: float, **args: Any) -> None:
        """A span for the trace only (a micro-batch, say), in `timeline.clock()` seconds; it counts towards no phase."""
        self._span(name, start, end, EVENT_TRACK, args)

    def wrote_checkpoint(self, start: float, end: float) -> None:
        """A checkpoint was written behind the phases, on a track of its own."""
        self._span("checkpoint", start, end, CHECKPOINT_TRACK, {})

    def end_step(self, step: int) -> dict[str, float]:
        """Seconds since the last call as `time/<phase>`, `time/idle`, `time/total`; phases that did not run are 0."""
        assert self._open_phase is None, f"step {step} ended inside phase {self._open_phase!r}"
        now = self.clock()
        total = now - self._step_start
        idle = max(0.0, total - sum(self._seconds.values()))  # rounding may leave -1e-17
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics |= {"time/idle": idle, "time/total": total}
        self._span(f"step {step}", self._step_start, now, PHASE_TRACK, {"step": step, "idle_s": round(idle, 6)})
        self._pending.insert(
            0, self._pending.pop()
        )  # viewers nest spans that start together in file order: parent first
        self._flush()
        self._step_start = now
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return metrics

    def close(self) -> None:
        if not self._file.closed:
            self._flush()
            self._file.close()

    def _span(self, name: str, start: float, end: float, track: int, args: dict[str, Any]) -> None:
        ts, until = self._microseconds(start), self._microseconds(end)
        span = {"name": name, "ph": "X", "ts": ts, "dur": until - ts, "pid": 1, "tid": track, "args": args}
        self._pending.append("," + json.dumps(span, default=str) + "\n")

    def _microseconds(self, at: float) -> int:
        return round((at + self._epoch_offset) * 1e6)

    def _flush(self) -> None:
        self._file.write("".join(self._pending).encode())
        self._file.flush()
        self._pending.clear()


def _open_trace(path: Path) -> Any:
    """Open for appending after the last whole line; a new (or headless) file gets the header that names the tracks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("r+b" if path.exists() else "w+b")
    whole = file.read().rfind(b"\n") + 1
    header = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "trimtab"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": PHASE_TRACK, "args": {"name": "phases"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": EVENT_TRACK, "args": {"name": "events"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": CHECKPOINT_TRACK, "args": {"name": "checkpoints"}},
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
