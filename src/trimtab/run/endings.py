"""How steps and runs of every stage end: accounted for; exported, interrupted, or given up as nothing is learned. How they are
saved is in keeping.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trimtab.base.errors import TrainingError, TrimtabError
from trimtab.base.files import aside_of, put_in_place
from trimtab.config.load import AnyConfig
from trimtab.model.adapters import has_adapters, save_adapters
from trimtab.model.load import save_model
from trimtab.model.policy import Policy
from trimtab.observe.console import Console
from trimtab.observe.curve import CURVE_FILE, plot_curve
from trimtab.observe.doctor.examine import examine
from trimtab.observe.doctor.record import read_record
from trimtab.observe.host import HostWatch
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.timeline import Timeline
from trimtab.plan.governor import Governor, Move
from trimtab.plan.watch import PlanWatch
from trimtab.record.checkpoint import CONFIG, RunState, folder_is_gone, newest_checkpoint
from trimtab.record.folder import FINAL
from trimtab.record.sinks import Sinks
from trimtab.run.inputs import Callback
from trimtab.update.guard import Guard
from trimtab.update.updater import Updater, UpdateStats

MAX_SKIPPED_IN_A_ROW = 5
MOST_FINDINGS_NAMED = 3


class Stepping(Protocol):
    """What every run has that goes step by step."""

    folder: Path
    state: RunState
    updater: Updater
    guard: Guard
    meter: MemoryMeter
    host: HostWatch
    watch: PlanWatch
    governor: Governor
    timeline: Timeline
    sinks: Sinks
    console: Console

    @property
    def config(self) -> AnyConfig: ...

    @property
    def callbacks(self) -> Sequence[Callback]: ...


def refuse_without_folder(run: Stepping) -> None:
    if not (run.folder / CONFIG).exists():
        raise folder_is_gone(run.folder, run.state.step)


def account(run: Stepping, metrics: dict[str, float], tokens: float, steps: int, recovered: int) -> None:
    """Close the accounts of a step into its metrics, and move the budget. `recovered`: recoveries from lack of memory before the
    step."""
    state = run.state
    metrics |= run.guard.end_step() | run.meter.end_step() | run.host.end_step(steps - state.step)
    metrics |= run.watch.end_step(metrics)
    if state.oom_recoveries == recovered:
        updater = run.updater
        now = Move(updater.token_budget, updater.checkpoint_activations)
        move = run.governor.next_move(metrics, now, run.guard.ceiling.get("token_budget"))
        if move is not None:
            updater.token_budget = move.budget
            updater.recompute(move.recompute)
    metrics |= run.timeline.end_step(state.step) | {"run/oom_recoveries": float(state.oom_recoveries)}
    metrics["throughput/tokens_per_s"] = tokens / metrics["time/total"]
    metrics |= run.watch.used(metrics["time/update"])


def export(folder: Path, policy: Policy, tokenizer: Any, guard: Guard) -> None:
    """RUN/final, whole or as it was before: the model, and adapters beside it where there are some."""
    aside = aside_of(folder / FINAL)
    guard.run("export", lambda: save_model(policy.model, tokenizer, aside))
    if has_adapters(policy.model):
        save_adapters(policy.model, aside / "adapter")
    put_in_place(aside, folder / FINAL)


def where_it_stands(folder: Path, state: RunState, steps: int) -> str:
    """What to tell somebody whose run has just stopped."""
    checkpoint = newest_checkpoint(folder)
    kept = (
        f"its last checkpoint is {checkpoint.name}"
        if checkpoint
        else "it has no checkpoint yet, so that starts it over"
    )
    found = doctor_words(folder)
    return (
        f"{folder} ended after step {state.step} of {steps}; to go on, resume it: {kept}{f'. {found}' if found else ''}"
    )


def look_back(folder: Path, console: Console) -> None:
    """The learning curve of a run that has ended, and whether the doctor finds something. Neither can fail the run."""
    draw_curve(folder, console)
    if found := doctor_words(folder):
        console.note(found)


def draw_curve(folder: Path, console: Console) -> None:
    try:
        plot_curve(folder, folder / CURVE_FILE)
    except Exception as error:  # the model is trained and exported: no fault of a picture may take the run's end away
        console.note(f"{CURVE_FILE} is not drawn: {error}")
    else:
        console.note(f"learning curve: {folder / CURVE_FILE}")


def doctor_words(folder: Path) -> str | None:
    """What the doctor finds in a run, in one line that says how to see the rest; None: nothing."""
    try:
        found = examine(read_record(folder)).findings
    except TrimtabError:  # a folder that was moved away, say: told by whoever needs it
        return None
    if not found:
        return None
    titles = "; ".join(finding.title for finding in found[:MOST_FINDINGS_NAMED])
    more = f"; and {len(found) - MOST_FINDINGS_NAMED} more" if len(found) > MOST_FINDINGS_NAMED else ""
    return f"The doctor finds: {titles}{more}. Run `trimtab doctor {folder}`"


def is_due(step: int, every: int, steps: int) -> bool:
    """What comes every so many steps (0: never), and after the last."""
    return step == steps or bool(every and step % every == 0)


def note_outcome(state: RunState, stats: UpdateStats, console: Console, look: str) -> None:
    """Count what was applied; a gradient that is not finite changes nothing, and too many in a row end the run."""
    if stats.applied:
        state.version += 1
        state.skipped_in_a_row = 0
        return
    state.skipped_in_a_row += 1
    console.warn(f"step {state.step + 1}: the gradient is not finite; weights and optimizer are unchanged")
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise TrainingError(
            f"{MAX_SKIPPED_IN_A_ROW} updates in a row had a gradient that is not finite. The weights are those of the last good "
            f"step. Lower learn.lr, or look {look}."
        )
