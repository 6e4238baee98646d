"""Surviving, as the user sees it: each time memory ran out there is a line on the console, a span in the trace, one more in
`run/oom_recoveries`, and what was lowered goes into the next checkpoint."""

from __future__ import annotations

from trimtab.checkpoint import RunState
from trimtab.observe.console import Console
from trimtab.observe.timeline import Timeline
from trimtab.rollout.engine import Engine
from trimtab.update.guard import Guard, Recovery
from trimtab.update.updater import Updater


def open_guard(
    updater: Updater, engine: Engine, state: RunState, console: Console, timeline: Timeline, longest: int
) -> Guard:
    """The guard of a run, as low as an earlier session left it. `longest`: tokens of the longest sequence it can meet."""

    def note(line: str, counted: bool) -> None:
        state.oom_recoveries += counted
        state.memory = guard.state()
        console.warn(f"step {state.step + 1}: {line}")
        now = timeline.clock()
        timeline.event("out of memory" if counted else "memory is short", now, now, what=line)

    def report(recovery: Recovery) -> None:
        note(str(recovery), recovery.replayed)

    guard = Guard(updater, engine, least_kv_tokens=longest, report=report)
    lowered = guard.restore(state.memory)
    if lowered:
        values = ", ".join(f"{name} {value}" for name, value in lowered.items())
        console.note(f"lower than planned, because memory ran out earlier in this run: {values}")
    engine.on_recovery = lambda line: note(line, True)
    return guard
