"""What a run says of itself as it goes: events.jsonl, run.json and now.json, from its start to however it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from trimtab.base.errors import cut, first_line
from trimtab.base.signals import Terminated
from trimtab.observe.pulse import Pulse
from trimtab.record.events import EventLog, Level
from trimtab.record.run_file import RunFile


class Journal:
    """Made before the run folder is; `open` begins to write. What happened before waits until then."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.events = EventLog(clock)
        self._clock = clock
        self._run: RunFile | None = None
        self._steps = 0
        self._pulse: Pulse | None = None
        self._outcome: tuple[str, str] | None = None
        """How the run ended, where that is known: its state, and words."""

    def event(self, level: Level, kind: str, text: str, data: Mapping[str, Any] | None = None) -> None:
        self.events.add(level, kind, text, data)

    def open(
        self,
        folder: Path,
        resumed_from: int | None,
        steps: int,
        facts: Mapping[str, Any],
        every: Sequence[Callable[[], object]] = (),
    ) -> None:
        """`resumed_from`: the step after which the run goes on; None: it is new. `every`: called again and again by a thread."""
        run = RunFile(folder, resumed_from is not None)
        first = (resumed_from or 0) + 1
        if facts.get("set") is None:
            facts = {**facts, "set": run.set_before}
        run.begin(self._clock(), first, {**facts, "steps": steps})
        self._run, self._steps = run, steps
        self.events.open(folder)
        self.step(first if resumed_from else 0)
        if resumed_from is None:
            self.event("info", "start", f"started; {steps} steps to do", {"start": run.start})
        else:
            text = f"start {run.start}: resumed after step {resumed_from}"
            self.event("info", "resume", text, {"start": run.start, "after": resumed_from})
        self._pulse = Pulse(folder, steps, run.start, every, self._clock)
        self._pulse.step = self.events.step or 0
        self._pulse.start()

    @property
    def start(self) -> int:
        """The number of this start, from 1."""
        assert self._run is not None
        return self._run.start

    def step(self, number: int) -> None:
        """The step that is under way."""
        number = self.events.step = min(number, self._steps)
        if self._pulse is not None:
            self._pulse.step = number

    def running(self) -> None:
        """The first step has begun."""
        assert self._run is not None
        self._run.change(state="running")

    def phase(self, name: str | None, what: str | None = None) -> None:
        if self._pulse is not None:
            self._pulse.phase(name, what)

    @property
    def doing(self) -> tuple[str | None, int | None]:
        """The phase, and the step that is under way."""
        return (None if self._pulse is None else self._pulse.doing), self.events.step

    def take_cost_s(self) -> float:
        """Processor seconds of the thread that watches, since the last call."""
        return 0.0 if self._pulse is None else self._pulse.take_cost_s()

    def settle(self) -> None:
        """All events are written; raises what keeps them from that."""
        self.events.settle()

    def finished(self, words: str) -> None:
        """All steps are done and the model is exported."""
        self._outcome = ("finished", words)

    def restarting(self) -> None:
        """It ends only to begin again, in the same process."""
        self._outcome = ("starting", "")

    def exit(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write down how it ended. For an ExitStack: whatever of the run is closed before this may still fail."""
        if self._run is None:
            return
        if self._pulse is not None:
            self._pulse.close()
        state, words, failed = self._how_it_ended(error)
        if words:
            level: Level = {"finished": "info", "stopped": "warn"}.get(state, "error")  # type: ignore[assignment]
            self.event(level, "error" if state == "failed" else "end", words, {"state": state})
        with suppress(OSError):  # what ended the run may be a full disk, and is told
            ended = None if state == "starting" else round(self._clock(), 3)
            self._run.change(state=state, error=failed, ended_at=ended)
        self.events.close()

    def _how_it_ended(self, error: BaseException | None) -> tuple[str, str, dict[str, str] | None]:
        if self._outcome is not None and (error is None or self._outcome[0] == "starting"):
            return *self._outcome, None
        if error is None:
            return "stopped", "ended before all steps were done", None
        if isinstance(error, KeyboardInterrupt):
            by = error.signum.name if isinstance(error, Terminated) else "Ctrl-C"
            return "stopped", f"stopped by {by}", None
        text = cut(str(error).strip() or first_line(error))
        return "failed", f"{type(error).__name__}: {text}", {"type": type(error).__name__, "text": text}
