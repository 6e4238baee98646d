"""Checkpoints: whole or not there. safetensors and JSON, nothing pickled.

A checkpoint is written into a folder with another name, flushed to disk, and renamed; deleting one renames it away first. So at
any moment, a kill included, every folder called `step-N` is complete, and the newest of them resumes the run exactly.
Writing one takes no device memory: tensors are put in order on the host.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from trimtab.errors import ConfigError, TrainingError, is_no_space
from trimtab.model.adapters import has_adapters, save_adapters
from trimtab.model.load import save_model
from trimtab.model.memory import is_out_of_memory
from trimtab.update.optimizer import MasterAdamW

FORMAT = 1
CONFIG, STATE, OPTIMIZER = "config.yaml", "state.json", "optimizer.safetensors"


@dataclass
class RunState:
    """Everything a run knows besides tensors. Small, and saved as JSON."""

    step: int = 0
    """Steps done."""
    version: int = 0
    """Policy version: optimizer steps applied."""
    data_position: int = 0
    kl_coef: float = 0.0
    skipped_in_a_row: int = 0
    best_step: int = -1
    best_score: float = float("-inf")
    reward_first: float | None = None
    reward_last: float | None = None
    accuracy_first: float | None = None
    accuracy_last: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    eval_loss_first: float | None = None
    eval_loss_last: float | None = None
    seconds: float = 0.0
    """Wall time of all sessions up to this checkpoint."""
    completion_tokens: int = 0
    oom_recoveries: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    """What running out of memory has taught: `Guard.state`."""
    data_mark: str = ""
    """Which rows it trains on (`data.files.mark_of`)."""

    def note_reward(self, mean: float) -> None:
        """Remember the first and the latest mean reward of a step that had any."""
        if math.isfinite(mean):
            self.reward_last = mean
            self.reward_first = mean if self.reward_first is None else self.reward_first

    def note_accuracy(self, accuracy: float) -> None:
        """Remember the first and the latest evaluation, and the best after training began."""
        self.accuracy_last = accuracy
        self.accuracy_first = accuracy if self.accuracy_first is None else self.accuracy_first
        if self.step and accuracy > self.best_score:
            self.best_step, self.best_score = self.step, accuracy

    def note_loss(self, loss: float) -> None:
        """Remember the first and the latest loss of a supervised step."""
        self.loss_last = loss
        self.loss_first = loss if self.loss_first is None else self.loss_first

    def note_eval_loss(self, loss: float) -> None:
        """Remember the first and the latest held-out loss, and the best after training began."""
        self.eval_loss_last = loss
        self.eval_loss_first = loss if self.eval_loss_first is None else self.eval_loss_first
        if self.step and -loss > self.best_score:
            self.best_step, self.best_score = self.step, -loss


def save_checkpoint(
    run_dir: Path,
    state: RunState,
    model: Any,
    tokenizer: Any,
    optimizer: MasterAdamW,
    keep: int,
    others: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> Path:
    """Write `step-N`, then remove what is neither among the newest `keep` nor the best. `others`: more files of tensors."""
    folder = run_dir / "checkpoints"
    target, aside = folder / f"step-{state.step}", folder / f".writing-step-{state.step}"
    _refuse_numbers_that_are_none(model, run_dir, state.step)
    clear(folder)
    with _explaining_a_full_disk(run_dir, state.step):
        aside.mkdir(parents=True)
        if has_adapters(model):
            save_adapters(model, aside)
        else:
            save_model(model, tokenizer, aside)
        for name, tensors in {OPTIMIZER: optimizer.state_tensors(), **(others or {})}.items():
            save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, aside / name)
        if (run_dir / CONFIG).exists():
            shutil.copy(run_dir / CONFIG, aside)
        (aside / STATE).write_text(json.dumps({"format": FORMAT, **_finite(asdict(state))}, indent=2) + "\n")
        flush_to_disk(aside)
    if target.exists():
        remove_whole(target)
    aside.rename(target)
    _fsync(folder)
    prune(run_dir, keep, state.best_step)
    return target


@torch.no_grad()
def _refuse_numbers_that_are_none(model: Any, run_dir: Path, step: int) -> None:
    """Weights that are not finite replace none that are. Their largest is asked for, which takes no memory beside them."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad and weight.numel()}
    largest = {name: torch.linalg.vector_norm(weight, math.inf).double() for name, weight in trained.items()}
    if largest and not torch.stack(list(largest.values())).isfinite().all():
        name = next(name for name, value in largest.items() if not value.isfinite())
        newest = newest_checkpoint(run_dir)
        kept = "There is no earlier checkpoint" if newest is None else f"{newest.name} is as it was"
        raise TrainingError(
            f"after step {step} {name} holds values that are not finite: the update was too large for its type. {kept}. Lower "
            "learn.lr or learn.max_grad_norm."
        )


@contextmanager
def _explaining_a_full_disk(run_dir: Path, step: int) -> Iterator[None]:
    """Turn a full disk into a TrainingError, after removing what was half written."""
    try:
        yield
    except Exception as error:
        if not is_no_space(error):
            raise
        clear(run_dir / "checkpoints")
        newest = newest_checkpoint(run_dir)
        kept = "there is no earlier one" if newest is None else f"the newest that is whole is {newest.name}"
        fewer = "" if newest is None else ", or write observe.keep_checkpoints: 1"
        raise TrainingError(
            f"there is no space left for the checkpoint of step {step} in {run_dir}, and {kept}. Free some "
            f"space{fewer}; then go on with --resume."
        ) from error


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, in order."""
    return _steps(run_dir / "checkpoints")


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The last complete checkpoint of a run, if it has one."""
    return next(reversed(checkpoints(run_dir).values()), None)


def load_state(checkpoint: Path) -> RunState:
    with reading(checkpoint):
        saved = json.loads((checkpoint / STATE).read_text())
        if saved.pop("format", None) != FORMAT:
            raise TrainingError(
                f"{checkpoint} was written by another version of Trimtab and cannot be resumed by this one."
            )
        known = {f.name for f in fields(RunState)}
        values = {key: value for key, value in saved.items() if key in known}
        if values.get("best_score") is None:
            values.pop("best_score", None)
        state = TypeAdapter(RunState).validate_python(values)
        if checkpoint.name != f"step-{state.step}" or min(state.step, state.version, state.data_position) < 0:
            raise ValueError(f"{STATE} says that it is of step {state.step}, from row {state.data_position} on")
    return state


def load_optimizer(checkpoint: Path, optimizer: MasterAdamW) -> None:
    with reading(checkpoint):
        optimizer.load_state_tensors(load_file(checkpoint / OPTIMIZER))


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Tell a checkpoint that cannot be read, or does not hold what it should, as that, with the one to go on from."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TrainingError | ConfigError) or is_out_of_memory(error):
            raise
        others = [path.name for path in checkpoints(checkpoint.parent.parent).values() if path != checkpoint]
        rest = f"the run then goes on from {others[-1]}" if others else "there is no other, so the run then starts over"
        why = (str(error).strip().splitlines() or ["no message"])[0]
        raise TrainingError(
            f"{checkpoint} cannot be read ({type(error).__name__}: {why}). If it is damaged, move it away and resume again: "
            f"{rest}."
        ) from error


def prune(run_dir: Path, keep: int, best_step: int) -> None:
    """Remove the checkpoints that are neither among the newest `keep` nor the best."""
    found = checkpoints(run_dir)
    kept = {*list(found)[-keep:], best_step}
    for step, path in found.items():
        if step not in kept:
            remove_whole(path)


def clear(folder: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for leftover in [*folder.glob(".writing-*"), *folder.glob(".deleting-*")]:
        shutil.rmtree(leftover)


def remove_whole(folder: Path) -> None:
    """Delete a folder so that it is never seen half deleted under its name."""
    away = folder.with_name(f".deleting-{folder.name}")
    folder.rename(away)
    shutil.rmtree(away)


def flush_to_disk(folder: Path) -> None:
    for file in _files(folder):
        _fsync(file)
    _fsync(folder)


def _steps(folder: Path) -> dict[int, Path]:
    matches = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match and (path / STATE).is_file()))


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity; the best score of a run without evaluations is null."""
    return {k: None if isinstance(v, float) and v in (float("inf"), float("-inf")) else v for k, v in values.items()}
