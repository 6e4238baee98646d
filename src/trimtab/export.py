"""From a run folder to a model folder that any Hugging Face tool loads."""

from __future__ import annotations

from pathlib import Path

import torch

from trimtab.checkpoint import load_state, newest_checkpoint
from trimtab.config.schema import Model
from trimtab.errors import ConfigError, Problem
from trimtab.model.load import DTYPES, load_model, load_tokenizer, save_model


def find_checkpoint(run: Path, which: str) -> Path:
    """The checkpoint that `best`, `last` or a step number means."""
    newest = newest_checkpoint(run)
    if newest is None:
        raise ConfigError([Problem("RUN", f"{run} has no checkpoint", "Give the folder of a run that has saved one.")])
    there = ", ".join(sorted(path.name.removeprefix("step-") for path in newest.parent.glob("step-*")))
    if which == "last":
        return newest
    if which == "best":
        best = load_state(newest).best_step
        if best < 0:
            raise ConfigError(
                [Problem("--checkpoint", "this run has no evaluation to choose the best by", "Use last.")]
            )
        which = str(best)
    found = newest.parent / f"step-{which}"
    if not found.is_dir():
        raise ConfigError([Problem("--checkpoint", f"{run} has no checkpoint {which!r}", f"There are {there}.")])
    return found


def export_run(run: Path, to: Path, which: str, dtype: str) -> Path:
    """Write the chosen checkpoint's weights and tokenizer to `to`; returns the checkpoint."""
    if dtype not in (*DTYPES, "same"):
        raise ConfigError([Problem("--dtype", f"{dtype!r} is not a type", f"One of {', '.join(DTYPES)} or same.")])
    if to.exists() and any(to.iterdir()):
        raise ConfigError([Problem("FOLDER", f"{to} already exists and is not empty", "Choose a new folder.")])
    source = find_checkpoint(run, which)
    settings = Model(path=str(source), dtype="auto" if dtype == "same" else dtype)
    model = load_model(settings, torch.device("cpu")) if dtype != "same" else _as_saved(source)
    save_model(model, load_tokenizer(settings), to)
    return source


def _as_saved(folder: Path) -> object:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
