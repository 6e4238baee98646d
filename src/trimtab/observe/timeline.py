"""Where the seconds of a step go: every second of wall time belongs to exactly one phase or to idle.

Phases do not nest and do not outlive their step, so `time/total` = sum of `time/<phase>` + `time/idle` by construction.
The same spans go to RUN/trace.json (trace_file.py), flushed at each step, and with them what was done within the phases
(base/spans.py): of the first steps, of every 50th, and of those that took much longer than others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from trimtab.base.spans import SpanLog, log
from trimtab.observe.trace_file import CHECKPOINTS_TRACK, EVENTS_TRACK, PHASES_TRACK, TracedSpan, TraceFile
from trimtab.record.layout import TRACE_FILE

PHASES = ("rollout", "reward", "score", "update", "publish", "checkpoint", "eval")
DETAILED_FIRST_STEPS = 20
DETAILED_EVERY_STEPS = 50
SLOW_RATIO = 1.5
"""A step that takes this many medians of the latest ones is slow."""
MEDIAN_WINDOW_STEPS, MIN_STEPS_FOR_MEDIAN = 50, 5


class Timeline:
    """Measures phases; the first step counts from construction, so construct it where the loop starts."""

    def __init__(
        self,
        run_dir: Path,
        on_phase: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
        spans: SpanLog = log,
        steps: int | None = None,
    ) -> None:
        """`spans`: what is done within phases, by the same clock. `steps`: of the run; after the last, spans are that one's."""
        self.clock = clock
        self._on_phase, self._spans, self._steps = on_phase, spans, steps
        self._open_phase: str | None = None
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._pending: list[TracedSpan] = []
        self._totals: deque[float] = deque(maxlen=MEDIAN_WINDOW_STEPS)
        self._step: int | None = None
        """The step under way, where that is known."""
        self._file = TraceFile(Path(run_dir) / TRACE_FILE, wall_clock() - clock())
        self._spans.take()
        self._spans.on = True
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
            self._span(name, start, end, PHASES_TRACK)

    def event(self, name: str, start: float, end: float, **args: Any) -> None:
        """A span for the trace only, in `timeline.clock()` seconds; it counts towards no phase."""
        self._span(name, start, end, EVENTS_TRACK, **args)

    def wrote_checkpoint(self, start: float, end: float, **args: Any) -> None:
        """A checkpoint was written behind the phases, on a track of its own."""
        self._span("checkpoint", start, end, CHECKPOINTS_TRACK, **args)

    def end_step(self, step: int) -> dict[str, float]:
        """Seconds since the last call as `time/<phase>`, `time/idle`, `time/total`; phases that did not run are 0."""
        assert self._open_phase is None, f"step {step} ended inside phase {self._open_phase!r}"
        now = self.clock()
        total = now - self._step_start
        idle = max(0.0, total - sum(self._seconds.values()))  # rounding may leave -1e-17
        metrics = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics |= {"time/idle": idle, "time/total": total}
        # Viewers nest spans that start together in file order: parent first.
        whole = TracedSpan(PHASES_TRACK, f"step {step}", self._step_start, now, {"idle_s": round(idle, 6)})
        self._pending.insert(0, whole)
        self._flush(step, self._is_detailed(step, total))
        self._totals.append(total)
        self._step_start, self._step = now, step + 1
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return metrics

    def since_step(self, phase: str) -> float:
        """Seconds of a phase since the last step ended: after the last one, they are in no row."""
        return self._seconds[phase]

    def close(self) -> None:
        if not self._file.closed:
            step = self._step if self._step is None or self._steps is None else min(self._step, self._steps)
            self._flush(step, True)
            self._file.close()
            self._spans.forget()

    def _is_detailed(self, step: int, total: float) -> bool:
        usual = median(self._totals) if len(self._totals) >= MIN_STEPS_FOR_MEDIAN else total
        return step <= DETAILED_FIRST_STEPS or step % DETAILED_EVERY_STEPS == 0 or total > SLOW_RATIO * usual

    def _span(self, name: str, start: float, end: float, track: str, **args: Any) -> None:
        self._pending.append(TracedSpan(track, name, start, end, args))

    def _flush(self, step: int | None, detailed: bool) -> None:
        """Write what is pending as of a step, and what was done within it if that is wanted."""
        inner = self._spans.take()
        spans = self._pending
        if detailed:
            spans = spans + [TracedSpan(*span) for span in inner.spans]
        if detailed and inner.left_out:
            spans.append(
                TracedSpan(EVENTS_TRACK, "spans left out", self.clock(), self.clock(), {"count": inner.left_out})
            )
        own = {} if step is None else {"step": step}
        stamped = [span._replace(args={**own, **span.args}) for span in spans]
        self._file.write(stamped, inner.counters if detailed else ())
        self._pending = []
