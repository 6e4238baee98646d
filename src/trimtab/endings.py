"""How runs of every stage end: exported, interrupted, or given up because nothing is learned any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.checkpoint import RunState, flush_to_disk, newest_checkpoint, remove_whole
from trimtab.errors import TrainingError
from trimtab.folder import FINAL
from trimtab.model.adapters import has_adapters, save_adapters
from trimtab.model.load import save_model
from trimtab.model.policy import Policy
from trimtab.observe.console import Console
from trimtab.update.guard import Guard
from trimtab.update.updater import UpdateStats

MAX_SKIPPED_IN_A_ROW = 5


def export(folder: Path, policy: Policy, tokenizer: Any, guard: Guard) -> None:
    """RUN/final, whole or as it was before: the model, and adapters beside it where there are some."""
    aside = folder / f".writing-{FINAL}"
    guard.run("export", lambda: save_model(policy.model, tokenizer, aside))
    if has_adapters(policy.model):
        save_adapters(policy.model, aside / "adapter")
    flush_to_disk(aside)
    if (folder / FINAL).exists():
        remove_whole(folder / FINAL)
    aside.rename(folder / FINAL)


def where_it_stands(folder: Path, state: RunState, steps: int) -> str:
    """For somebody whose run has just stopped."""
    checkpoint = newest_checkpoint(folder)
    kept = (
        f"its last checkpoint is {checkpoint.name}"
        if checkpoint
        else "it has no checkpoint yet, so that starts it over"
    )
    return f"{folder} ended after step {state.step} of {steps}; to go on, resume it: {kept}"


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
