"""The resume decision: which checkpoint a run continues from, and which settings may differ from those of the checkpoint.

`load_or_init_state` answers both. A run without --resume, or without a checkpoint, starts at its first step. A setting that the
checkpoint's weights or optimizer are made for is refused when it changes; any other change is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.load import AnyConfig, load_any
from trimtab.config.reference import STAGES
from trimtab.config.schema import Model
from trimtab.data.files import fingerprint
from trimtab.model.load import load_config, resolve_dtype
from trimtab.observe.console import Console
from trimtab.record.checkpoint import CONFIG, RunState, explain_load_errors, load_state, newest_checkpoint
from trimtab.record.folder import changes

CANNOT_CHANGE = {
    "learn.critic.path": "another critic",
    "learn.optimizer.states": "another type of optimizer state",
    "model.base": "another frozen model under the adapters",
    "model.lora": "other adapters",
}
"""Keys that a checkpoint's optimizer is made for, and what a change of each would mean."""


def load_or_init_state(
    config: AnyConfig,
    device: torch.device,
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    resume: bool,
    console: Console,
) -> tuple[Path | None, RunState, list[str]]:
    """The checkpoint that a run continues from, if any; the run's state; and which settings changed since that checkpoint."""
    checkpoint, state, changed = newest_checkpoint(folder) if resume else None, RunState(), list[str]()
    if checkpoint is not None:
        state = load_state(checkpoint)
        changed = _refuse_changed_settings(config, device, folder, checkpoint, console)
    elif resume:
        console.note(f"{folder} has no checkpoint to resume; the run starts at step 1")
    _note_data(state, rows, console)
    return checkpoint, state, changed


def _refuse_changed_settings(
    config: AnyConfig, device: torch.device, folder: Path, checkpoint: Path, console: Console
) -> list[str]:
    """Warn of settings that changed since the checkpoint, and return them; refuse those that its optimizer is made for."""
    held = _config_of(checkpoint, folder)
    if not isinstance(config, type(held)):
        name = next(name for name, schema in STAGES.items() if isinstance(held, schema))
        what, fix = (
            f"{folder} holds a run of trimtab {name}",
            f"Continue it with trimtab {name}, or choose another folder.",
        )
        raise ConfigError([Problem("observe.dir", what, fix)])
    changed = changes(held, config)
    for key, what in CANNOT_CHANGE.items():
        found = ", ".join(change for change in changed if change.startswith(key))
        if found:
            message = f"{checkpoint.name} cannot continue with {what}: {found}"
            raise ConfigError([Problem(key, message, f"Write the old value of {key}.")])
    if config.model.lora is None:
        trusted = config.model.trust_remote_code
        with explain_load_errors(checkpoint):
            saved = load_config(Model(path=str(checkpoint), trust_remote_code=trusted)).dtype
        wanted = resolve_dtype(config.model, device)
        if saved is not None and saved != wanted:
            before, now = (str(dtype).removeprefix("torch.") for dtype in (saved, wanted))
            what = f"{folder} was trained in {before} and cannot continue in {now}"
            raise ConfigError([Problem("model.dtype", what, f"Write model.dtype: {before}.")])
    if changed:
        console.warn(
            f"settings changed since {checkpoint.name}; the run continues with the new ones: {', '.join(changed)}"
        )
    return changed


def _config_of(checkpoint: Path, folder: Path) -> AnyConfig:
    """What the checkpoint was made with."""
    # Not the folder's: a resume with other settings may have ended before its first checkpoint.
    file = (checkpoint if (checkpoint / CONFIG).exists() else folder) / CONFIG
    with explain_load_errors(checkpoint):
        try:
            return load_any(file)
        except ConfigError as error:  # nobody has written it by hand
            raise ValueError(f"{file}: {error.problems[0]}") from error


def _note_data(state: RunState, rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Remember which rows are trained on, and say so where they are not those that the run has counted so far."""
    before, state.data_mark = state.data_mark, fingerprint(rows)
    if before and before != state.data_mark:
        state.pass_rates = {}  # of other rows
        console.warn(
            f"data.train changed since the checkpoint: {state.data_mark} (was {before}). Continuing at row "
            f"{state.data_position}: this pass may repeat some rows and skip others"
        )
