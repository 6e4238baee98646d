"""From a run folder to a model folder that any Hugging Face tool loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from trimtab.base.errors import ConfigError, Problem, is_no_space
from trimtab.base.files import aside_of, put_in_place
from trimtab.config.load import load_any
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Config, Model
from trimtab.config.sft import SftConfig
from trimtab.model.adapters import load_adapters
from trimtab.model.load import DTYPES, is_part, load_model, load_tokenizer, remember_whole, resolve_dtype, save_model
from trimtab.record.checkpoint import (
    CONFIG,
    STATE,
    check_files,
    checkpoints,
    explain_load_errors,
    read_state,
)
from trimtab.record.folder import FINAL
from trimtab.record.reader import run_of_checkpoint


def find_checkpoint(run: Path, which: str) -> Path:
    """The checkpoint that `best`, `last` or a step number means."""
    if holder := run_of_checkpoint(run):
        fix = f"Give the run's folder: trimtab export {holder} FOLDER --checkpoint {run.absolute().name[5:]}"
        raise ConfigError([Problem("RUN", f"{run} is a checkpoint, not a run", fix)])
    if not (run / CONFIG).is_file():
        raise ConfigError(
            [Problem("RUN", f"{run} is not the folder of a run", "Give the run folder that train printed.")]
        )
    found = checkpoints(run)
    if not found:
        raise ConfigError([Problem("RUN", f"{run} has no checkpoint yet")])
    step = max(found)
    if which == "best":
        step = read_state(found[step]).best_step
        if step < 0:
            raise ConfigError(
                [Problem("--checkpoint", f"{run} has no evaluation, so no best checkpoint", "Write last.")]
            )
    elif which.isdecimal():
        step = int(which)
    elif which != "last":
        raise ConfigError([Problem("--checkpoint", f"{which!r} is not a checkpoint", "Write best, last or a step.")])
    if step not in found:
        there = ", ".join(map(str, found))
        raise ConfigError(
            [Problem("--checkpoint", f"{run} has no checkpoint of step {step}", f"Its checkpoints: {there}.")]
        )
    return found[step]


def export_run(run: Path, to: Path, which: str, dtype: str) -> Path:
    """Write the chosen checkpoint's weights and tokenizer to `to`, whole or not at all; returns the checkpoint."""
    if dtype not in (*DTYPES, "same"):
        raise ConfigError([Problem("--dtype", f"{dtype!r} is not a dtype", f"Write {', '.join(DTYPES)} or same.")])
    target = _free_place(to, run)
    source = find_checkpoint(run, which)
    config = load_any(run / CONFIG)
    if isinstance(config, RewardModelConfig):
        what = f"{run} trained a reward model, which is exported once, at its end"
        raise ConfigError([Problem("RUN", what, f"Use {run / FINAL}.")])
    check_files(source, _is_exported)
    with _writing_aside(target, to) as aside:
        _write(config, source, aside, dtype)
    return source


def _is_exported(name: str) -> bool:
    """Of a checkpoint's files: not what only training reads."""
    training = ("optimizer*.safetensors", "critic*.safetensors")
    return name != CONFIG and not any(Path(name).match(pattern) for pattern in training)


def _free_place(to: Path, run: Path) -> Path:
    """The folder that `to` means, links followed: one that is not there, or is empty and can be replaced."""
    with _explaining_failed_writes(to):
        target = to.resolve()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError([Problem("FOLDER", f"{to} already exists and is not empty", "Choose another folder.")])
        if target.is_relative_to((run / "checkpoints").resolve()):
            what = f"{to} is inside the checkpoints folder of the run"
            raise ConfigError([Problem("FOLDER", what, "Choose a folder outside the run.")])
        if target.is_mount():
            what = f"{to} is a mount point, which export cannot replace"
            raise ConfigError([Problem("FOLDER", what, f"Choose a folder inside it: {to / 'model'}.")])
    return target


@contextmanager
def _writing_aside(target: Path, to: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place at the end. Where anything fails, or is stopped, all is as it was before."""
    aside = aside_of(target)
    made = [path for path in target.parents if not path.exists()]
    try:
        with _explaining_failed_writes(to):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            put_in_place(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise


def _write(config: Config | SftConfig, source: Path, aside: Path, dtype: str) -> None:
    model = config.model
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(here if config.run.device == "auto" else config.run.device)
    wanted = str(resolve_dtype(model, device)).removeprefix("torch.") if dtype == "same" else dtype
    if model.lora is not None:
        settings = model.with_values({"dtype": wanted})
        base = load_model(settings, torch.device("cpu"))
        with explain_load_errors(source):
            adapted = load_adapters(base, source)
        save_model(adapted, load_tokenizer(settings), aside)
    elif dtype == "same" and not is_part(model):
        for file in source.iterdir():
            if file.name != STATE and _is_exported(file.name):
                copy = shutil.copytree if file.is_dir() else shutil.copy2
                copy(file, aside / file.name)
    else:
        trusted = model.trust_remote_code
        settings = Model.model_validate({"path": str(source), "dtype": wanted, "trust_remote_code": trusted})
        loaded = remember_whole(load_model(settings, torch.device("cpu")), model)
        save_model(loaded, load_tokenizer(settings), aside)


@contextmanager
def _explaining_failed_writes(to: Path) -> Iterator[None]:
    """Turn a folder that cannot be written to, or a full disk, into an error message."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: a link that leads to itself
        if is_no_space(error):
            fix = "Free some space, or choose a folder on another disk."
            raise ConfigError([Problem("FOLDER", f"the disk has no space left for the model in {to}", fix)]) from error
        if not isinstance(error, OSError) and "Symlink loop" not in str(error):
            raise
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError([Problem("FOLDER", f"cannot write to {to}: {why}", "Choose another folder.")]) from error
