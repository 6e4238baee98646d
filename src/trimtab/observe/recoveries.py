"""Surviving, as the user sees it: each time memory ran out there is a line on the console, a span in the trace, one more in
`run/oom_recoveries`, and what was lowered goes into the next checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from trimtab.record.checkpoint import RunState
from trimtab.update.guard import Recovery


class Recoveries:
    """Engine and trainer report to it. It is made before the run folder: what it has heard waits to be taken into the trace."""

    def __init__(
        self, state: RunState, warn: Callable[[str, str], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`warn`: called with a line for the user, and the kind of event that it is."""
        self._state, self._warn, self._clock = state, warn, clock
        self._waiting: list[tuple[str, float, str]] = []

    @property
    def count(self) -> int:
        """How often memory ran out in this run."""
        return self._state.oom_recoveries

    def counts(self) -> dict[str, float]:
        """Both counts so far, as metrics; that of ranks where any were lost."""
        lost = self._state.rank_restarts
        return {"run/oom_recoveries": float(self.count)} | ({"run/rank_restarts": float(lost)} if lost else {})

    def of_engine(self, line: str) -> None:
        """The engine ran out of memory and goes on with less."""
        self._note(line, True)

    def of_policy(self, recovery: Recovery) -> None:
        self._note(str(recovery), recovery.replayed)

    def of_critic(self, recovery: Recovery) -> None:
        self._note(f"critic: {recovery}", recovery.replayed)

    def restarted(self, line: str) -> None:
        """A process of the engine was lost, and another goes on in its place."""
        self._tell("engine restarted", line, "engine")

    def take(self) -> list[tuple[str, float, str]]:
        """What has happened since the last call: its name, when, and what it was."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def _note(self, line: str, counted: bool) -> None:
        self._state.oom_recoveries += counted
        self._tell("out of memory" if counted else "memory is short", line, "recovery")

    def _tell(self, name: str, line: str, kind: str) -> None:
        self._warn(f"step {self._state.step + 1}: {line}", kind)
        self._waiting.append((name, self._clock(), line))
