"""Surviving, as the user sees it: each time memory ran out there is a line on the console, a span in the trace, one more in
`run/oom_recoveries`, and what was lowered goes into the next checkpoint."""

from __future__ import annotations

from trimtab.observe.console import Console
from trimtab.observe.timeline import Timeline
from trimtab.record.checkpoint import RunState
from trimtab.rollout.engine import Engine
from trimtab.rollout.no_rollout import NoRollout
from trimtab.update.critic import Critic
from trimtab.update.guard import Guard, Recovery
from trimtab.update.updater import Updater


def open_guard(
    updater: Updater, engine: Engine, state: RunState, console: Console, timeline: Timeline, longest: int
) -> Guard:
    """The guard of a run, as low as an earlier session left it. `longest`: tokens of the longest sequence it can meet."""

    def note(line: str, counted: bool) -> None:
        _note(line, counted, state, console, timeline)
        state.memory = guard.state()

    guard = Guard(updater, engine, least_kv_tokens=longest, report=lambda r: note(str(r), r.replayed))
    lowered = guard.restore(state.memory)
    if lowered:
        values = ", ".join(f"{name} {value}" for name, value in lowered.items())
        console.note(f"lower than planned, because memory ran out earlier in this run: {values}")
    engine.on_recovery = lambda line: note(line, True)
    engine.on_restart = lambda line: _restarted(line, state, console, timeline)
    return guard


def open_critic_guard(critic: Critic, state: RunState, console: Console, timeline: Timeline) -> Guard:
    """The same around a critic, which has budgets of its own. A resumed run finds them anew."""

    def report(recovery: Recovery) -> None:
        _note(f"critic: {recovery}", recovery.replayed, state, console, timeline)

    return Guard(critic, NoRollout(), least_kv_tokens=0, report=report)


def _restarted(line: str, state: RunState, console: Console, timeline: Timeline) -> None:
    console.warn(f"step {state.step + 1}: {line}")
    now = timeline.clock()
    timeline.event("engine restarted", now, now, what=line)


def _note(line: str, counted: bool, state: RunState, console: Console, timeline: Timeline) -> None:
    state.oom_recoveries += counted
    console.warn(f"step {state.step + 1}: {line}")
    now = timeline.clock()
    timeline.event("out of memory" if counted else "memory is short", now, now, what=line)
