"""How steps of every stage end: accounted for, or given up as nothing is learned. How they are saved is in save_on_stop.py."""

from __future__ import annotations

from typing import Any

from trimtab.base.errors import TrainingError
from trimtab.record.checkpoint import RunState, folder_is_gone
from trimtab.record.layout import CONFIG
from trimtab.run.roles import Observer, TrainingRun
from trimtab.update.stats import UpdateStats

MAX_SKIPPED_IN_A_ROW = 5


def refuse_without_folder(run: TrainingRun[Any, Any]) -> None:
    if not (run.folder / CONFIG).exists():
        run.trainer.settle_saves()  # a checkpoint before this step may not be saved either
        raise folder_is_gone(run.folder, run.state.step)


def account(
    run: TrainingRun[Any, Any], metrics: dict[str, float], tokens: float, steps_to_go: int, recovered: bool
) -> None:
    """Close the accounts of a step into its metrics, and choose the size of the next one's micro-batches, except where memory ran
    out (`recovered`)."""
    metrics |= run.trainer.end_step()
    run.observer.measure(metrics, steps_to_go)
    if not recovered:
        run.trainer.adapt(metrics)
    run.observer.account(run.state.step, metrics, tokens)


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether something is due that happens every N steps (0: never), and after the last."""
    return step == steps or bool(every and step % every == 0)


def note_outcome(state: RunState, stats: UpdateStats, observer: Observer, look: str) -> None:
    """Count what was applied; a gradient that is not finite changes nothing, and too many in a row end the run."""
    if stats.applied:
        state.version += 1
        state.skipped_in_a_row = 0
        return
    state.skipped_in_a_row += 1
    observer.warn(f"step {state.step + 1}: the gradient is not finite, so this update is skipped")
    if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise TrainingError(
            f"{MAX_SKIPPED_IN_A_ROW} updates in a row had a gradient that is not finite. The weights are still those of the "
            f"last good step. Lower learn.lr, or look {look}."
        )
