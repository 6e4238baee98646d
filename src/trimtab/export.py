"""From a run folder to a model folder that any Hugging Face tool loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trimtab.checkpoint import CONFIG, OPTIMIZER, STATE, checkpoints, flush_to_disk, load_state
from trimtab.config.load import load_any
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Model
from trimtab.errors import ConfigError, Problem, is_no_space
from trimtab.folder import FINAL
from trimtab.model.adapters import load_adapters
from trimtab.model.load import DTYPES, load_model, load_tokenizer, resolve_dtype, save_model
from trimtab.observe.doctor.record import run_of_checkpoint


def find_checkpoint(run: Path, which: str) -> Path:
    """The checkpoint that `best`, `last` or a step number means."""
    if holder := run_of_checkpoint(run):
        fix = f"Give the run's folder: trimtab export {holder} FOLDER --checkpoint {run.absolute().name[5:]}"
        raise ConfigError([Problem("RUN", f"{run} is a checkpoint, not a run", fix)])
    if not (run / CONFIG).is_file():
        raise ConfigError([Problem("RUN", f"{run} is not the folder of a run", "Give the run_dir that train printed.")])
    found = checkpoints(run)
    if not found:
        raise ConfigError([Problem("RUN", f"{run} has no checkpoint yet")])
    step = max(found)
    if which == "best":
        step = load_state(found[step]).best_step
        if step < 0:
            raise ConfigError([Problem("--checkpoint", f"{run} has no evaluation to choose the best by", "Use last.")])
    elif which.isdecimal():
        step = int(which)
    elif which != "last":
        raise ConfigError([Problem("--checkpoint", f"{which!r} is not a checkpoint", "Write best, last or a step.")])
    if step not in found:
        there = ", ".join(map(str, found))
        raise ConfigError([Problem("--checkpoint", f"{run} has no checkpoint of step {step}", f"There is: {there}.")])
    return found[step]


def export_run(run: Path, to: Path, which: str, dtype: str) -> Path:
    """Write the chosen checkpoint's weights and tokenizer to `to`, whole or not at all; returns the checkpoint."""
    if dtype not in (*DTYPES, "same"):
        raise ConfigError([Problem("--dtype", f"{dtype!r} is not a type", f"Write {', '.join(DTYPES)} or same.")])
    with _writable(to):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError([Problem("FOLDER", f"{to} already exists and is not an empty folder", "Choose another.")])
    source = find_checkpoint(run, which)
    config = load_any(run / CONFIG)
    if isinstance(config, RewardModelConfig):
        what = f"{run} is the run of a reward model, which is written out once, normalised, at its end"
        raise ConfigError([Problem("RUN", what, f"Take {run / FINAL}.")])
    aside = to.absolute().with_name(f".writing-{to.absolute().name}")
    shutil.rmtree(aside, ignore_errors=True)
    with _writable(to):
        aside.mkdir(parents=True)
    model = config.model
    if model.lora is not None:
        trained_in = str(resolve_dtype(model, torch.device(config.run.device))).removeprefix("torch.")
        settings = model.model_copy(update={"dtype": trained_in if dtype == "same" else dtype})
        adapted = load_adapters(load_model(settings, torch.device("cpu")), source)
        save_model(adapted, load_tokenizer(settings), aside)
    elif dtype == "same":
        without = shutil.ignore_patterns(CONFIG, STATE, OPTIMIZER, "critic*.safetensors")
        shutil.copytree(source, aside, ignore=without, dirs_exist_ok=True)
    else:
        trusted = model.trust_remote_code
        settings = Model.model_validate({"path": str(source), "dtype": dtype, "trust_remote_code": trusted})
        save_model(load_model(settings, torch.device("cpu")), load_tokenizer(settings), aside)
    flush_to_disk(aside)
    aside.rename(to.absolute())
    return source


@contextmanager
def _writable(to: Path) -> Iterator[None]:
    """A place where nothing can be made is told in words, before any weight is read."""
    try:
        yield
    except OSError as error:
        if is_no_space(error):
            raise
        raise ConfigError([Problem("FOLDER", f"cannot write to {to}: {error.strerror}", "Choose another.")]) from error
