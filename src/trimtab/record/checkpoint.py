"""Checkpoints: whole or not there, and what was written or refused. safetensors and JSON, nothing pickled.

A checkpoint is written into a folder with another name, flushed to disk, and renamed; deleting one renames it away first. So at
any moment, a kill included, every folder called `step-N` is complete, and the newest of them resumes the run exactly.
Writing one takes no device memory: tensors are put in order on the host.

Format 2: `state.json`, written last, has the size and sha256 of every other file, and its own sha256. Optimizer state is flat
tensors, one a kind and unit of the weight store (model/weights.py); `tables` says which parameter lies where in them, so they are
read whatever the units are. Format 1, which has neither and names the state by parameter, is read too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trimtab.base.errors import ConfigError, DivergedError, TrainingError, is_no_space
from trimtab.base.files import aside_of, clear, fsync, put_in_place, remove_whole, write_json
from trimtab.model.adapters import has_adapters, save_adapters
from trimtab.model.load import save_model
from trimtab.model.memory import is_out_of_memory
from trimtab.model.weights import Place
from trimtab.record.checksums import Sum, refuse_other_files, sums_of
from trimtab.record.layout import CONFIG

FORMAT = 2
BEFORE_CHECKSUMS = 1
"""The format that is still read."""
STATE, OPTIMIZER = "state.json", "optimizer.safetensors"
FACTS, WEIGHTS_MARK = "trimtab", "weights"
"""What a file of tensors of format 1 says of itself."""
FILES, TABLES, DIGEST = "files", "tables", "sha256"
"""What `state.json` says of the checkpoint beside the run's state, and of itself."""
MAX_COUNT = 2**62
"""No run counts as far."""


class Stateful(Protocol):
    """What has state in flat tensors: an optimizer."""

    params: list[torch.nn.Parameter]

    def state_tensors(self) -> Mapping[str, torch.Tensor]: ...

    def table(self) -> list[Place]:
        """Which parameter lies where in them."""

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor], table: Sequence[Place] | None) -> None:
        """Take over what the other two gave. Without a table the tensors are named by parameter."""


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
    """Which rows it trains on (`data.files.fingerprint`)."""
    eval_due: bool = False
    """The evaluation of this step was stopped or failed: the run that resumes makes up for it."""

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
    optimizer: Stateful,
    keep: int,
    others: Mapping[str, Mapping[str, torch.Tensor] | Stateful] | None = None,
) -> Path:
    """Write `step-N`, then remove what is neither among the newest `keep` nor the best. `others`: what is in more files."""
    folder = run_dir / "checkpoints"
    target = folder / f"step-{state.step}"
    aside = aside_of(target)
    owners = {OPTIMIZER: optimizer, **(others or {})}
    parts = {name: owner if isinstance(owner, Mapping) else owner.state_tensors() for name, owner in owners.items()}
    tables = {name: owner.table() for name, owner in owners.items() if not isinstance(owner, Mapping)}
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    _refuse_to_save_non_finite({"": trained, **parts}, run_dir, state.step)
    has_config = (run_dir / CONFIG).exists()
    with _explaining_failed_writes(run_dir, state.step, has_config):
        folder.mkdir(exist_ok=True)
        clear(folder)
        aside.mkdir()
        if has_adapters(model):
            save_adapters(model, aside)
        else:
            save_model(model, tokenizer, aside)
        for name, tensors in parts.items():
            save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, aside / name)
        if has_config:
            shutil.copy(run_dir / CONFIG, aside)
        rows = {name: [asdict(place) for place in table] for name, table in tables.items()}
        write_state(aside, state, {"format": FORMAT, FILES: sums_of(aside), TABLES: rows})
        put_in_place(aside, target)
        fsync(run_dir)  # the first checkpoint makes a folder there
        prune(run_dir, keep, state.best_step)
    return target


def write_state(checkpoint: Path, state: RunState, of_files: Mapping[str, Any] | None = None) -> None:
    """Write the state of a checkpoint, whole or not at all. `of_files`: its format and what its files are; None: as it says."""
    if of_files is None:
        before = _read(checkpoint)
        of_files = {key: before[key] for key in ("format", FILES, TABLES) if key in before}
    saved = {"format": of_files["format"], **_finite(asdict(state)), **of_files}
    if saved["format"] != BEFORE_CHECKSUMS:
        saved[DIGEST] = _digest(saved)
    write_json(checkpoint / STATE, saved)
    fsync(checkpoint)


@torch.no_grad()
def largest_values(tensors: Iterable[torch.Tensor]) -> list[float]:
    """The largest absolute value in each tensor of floats, which takes no memory beside them and is the same on every device;
    not finite where any value is not."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    largest = [torch.linalg.vector_norm(tensor.detach(), math.inf).double().cpu() for tensor in floats]
    return torch.stack(largest).tolist() if largest else []


def _digest(saved: Mapping[str, Any]) -> str:
    """The sha256 of a state as JSON, however it is indented."""
    text = json.dumps({key: value for key, value in saved.items() if key != DIGEST}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The name of a tensor that holds NaN or infinity."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    values = zip(floats, largest_values(floats.values()))
    return next((name for name, value in values if not math.isfinite(value)), None)


def _refuse_to_save_non_finite(files: Mapping[str, Mapping[str, torch.Tensor]], run_dir: Path, step: int) -> None:
    """Values that are not finite replace none that are. `files`: tensors by file, the policy's weights under no name."""
    for file, tensors in files.items():
        name = _not_finite(tensors)
        if name is None:
            continue
        newest = newest_checkpoint(run_dir)
        kept = "There is no earlier checkpoint" if newest is None else f"{newest.name} is intact"
        what, rate = (f"{file}: {name}", "learn.critic.lr") if file.startswith("critic") else (name, "learn.lr")
        raise DivergedError(
            f"step {step} is not saved: {what} holds values that are not finite, because the update was too large. {kept}. Lower "
            f"{rate} or learn.max_grad_norm."
        )


def folder_is_gone(run_dir: Path, step: int) -> TrainingError:
    return TrainingError(
        f"{run_dir} was moved or deleted during the run, so step {step} is not saved. If you moved it, resume it at its new "
        "place (observe.dir)"
    )


@contextmanager
def _explaining_failed_writes(run_dir: Path, step: int, had_config: bool) -> Iterator[None]:
    """Turn what a disk or a folder can do to a checkpoint into a TrainingError, after removing what was half written."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or is_no_space(error) or "os error" in str(error)):
            raise
        with suppress(OSError):
            clear(run_dir / "checkpoints")
        if not run_dir.exists() or (had_config and not (run_dir / CONFIG).exists()):
            for made_again in (run_dir / "checkpoints", run_dir):  # by a library that makes what is not there
                with suppress(OSError):
                    made_again.rmdir()
            raise folder_is_gone(run_dir, step) from error
        raise TrainingError(_why_not_written(run_dir, step, error)) from error


def _why_not_written(run_dir: Path, step: int, error: Exception) -> str:
    found = checkpoints(run_dir)
    kept = f"the newest complete checkpoint is step-{max(found)}" if found else "there is no earlier checkpoint"
    if is_no_space(error):
        fewer = ", or write observe.keep_checkpoints: 1" if found else ""
        return (
            f"the disk has no space left for the checkpoint of step {step} in {run_dir}; {kept}. Free some space{fewer}, then "
            "continue with --resume."
        )
    failed = "cannot remove old checkpoints from" if step in found else f"cannot save step {step} in"
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{failed} {run_dir} ({why}); {kept}. Make the folder writable, then continue with --resume."


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by step, in order."""
    return _steps(run_dir / "checkpoints")


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The last complete checkpoint of a run, if it has one."""
    return next(reversed(checkpoints(run_dir).values()), None)


def load_state(checkpoint: Path) -> RunState:
    """The state of a checkpoint all of whose files are what was written."""
    state = read_state(checkpoint)
    check_files(checkpoint)
    return state


def check_files(checkpoint: Path, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """Refuse a checkpoint of which a file is missing, cut off, damaged or another's. `wanted`: the names to look at."""
    with explain_load_errors(checkpoint):
        written = {name: found for name, found in _read(checkpoint).get(FILES, {}).items() if wanted(name)}
        others = (path for path in checkpoints(checkpoint.parent.parent).values() if path != checkpoint)
        refuse_other_files(checkpoint, written, {path.name: _files_of(path) for path in others})


def _files_of(checkpoint: Path) -> dict[str, Sum]:
    """What another checkpoint's files were when it was written, as far as that can be read."""
    with suppress(ValueError, OSError, TrainingError):
        found: dict[str, Sum] = _read(checkpoint).get(FILES, {})
        return found
    return {}


def _read(checkpoint: Path) -> dict[str, Any]:
    """All that `state.json` says: of the run, and of the checkpoint's files."""
    saved: dict[str, Any] = json.loads((checkpoint / STATE).read_text())
    if saved.get("format") not in (BEFORE_CHECKSUMS, FORMAT):
        raise TrainingError(f"{checkpoint} was written by another version of Trimtab; this version cannot resume it.")
    if saved["format"] == FORMAT and saved.get(DIGEST) != _digest(saved):
        raise ValueError(f"{STATE} was changed or damaged after it was written: its sha256 differs")
    return saved


def read_state(checkpoint: Path) -> RunState:
    """The state alone, whatever the other files are."""
    with explain_load_errors(checkpoint):
        saved = _read(checkpoint)
        known = {f.name for f in fields(RunState)}
        values = {key: value for key, value in saved.items() if key in known}
        if values.get("best_score") is None:
            values.pop("best_score", None)
        _refuse_numbers_of_no_run(values)
        state = TypeAdapter(RunState).validate_python(values)
        if checkpoint.name != f"step-{state.step}" or min(state.step, state.version, state.data_position) < 0:
            raise ValueError(f"{STATE} is for step {state.step}, row {state.data_position}")
    return state


def _refuse_numbers_of_no_run(values: Mapping[str, Any]) -> None:
    """JSON as Python reads it has NaN, and counts without end."""
    kinds = {f.name: f.type for f in fields(RunState)}
    for name, value in values.items():
        if isinstance(value, float) and (kinds[name] == "int" or (kinds[name] == "float" and not math.isfinite(value))):
            raise ValueError(f"{STATE} has {name} {value!r}, which is not a valid value")
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise ValueError(f"{STATE} has {name} {float(value):.3g}, which is too large")


def load_part(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of one of a checkpoint's own files: of the checkpoint's step, and finite."""
    facts = _facts(file)
    if "step" in facts and file.parent.name != f"step-{facts['step']}":
        raise ValueError(f"{file.name} belongs to step {facts['step']}")
    tensors = load_file(file)
    if name := _not_finite(tensors):
        raise ValueError(f"{file.name}: {name} holds values that are not finite")
    return tensors


def load_optimizer(checkpoint: Path, optimizer: Stateful, file: str = OPTIMIZER) -> None:
    """Make the optimizer what it was. The weights it is for are those of the checkpoint, and are loaded already."""
    with explain_load_errors(checkpoint):
        saved = load_part(checkpoint / file)
        values = largest_values(optimizer.params)
        if not all(map(math.isfinite, values)):
            raise ValueError("its weights hold values that are not finite")
        mark = _facts(checkpoint / file).get(WEIGHTS_MARK)
        if mark is not None and mark != repr(math.fsum(values)):
            raise ValueError(f"its weights do not belong to {file}: they are from another step, or damaged")
        optimizer.load_state_tensors(saved, _table(checkpoint, file))


def _table(checkpoint: Path, file: str) -> list[Place] | None:
    """Which parameter lies where in a file of flat tensors; None in format 1."""
    tables = _read(checkpoint).get(TABLES)
    return None if tables is None else TypeAdapter(list[Place]).validate_python(tables[file])


def _facts(file: Path) -> dict[str, Any]:
    """What a file of tensors of format 1 says beside them."""
    with safe_open(file, "pt") as opened:
        found: dict[str, Any] = json.loads((opened.metadata() or {}).get(FACTS, "{}"))
    return found


@contextmanager
def explain_load_errors(checkpoint: Path) -> Iterator[None]:
    """Turn errors while a checkpoint is read into a TrainingError that names it, and the checkpoint to continue from."""
    try:
        yield
    except Exception as error:
        if isinstance(error, TrainingError | ConfigError) or is_out_of_memory(error):
            raise
        others = [path.name for path in checkpoints(checkpoint.parent.parent).values() if path != checkpoint]
        rest = (
            f"the run then continues from {others[-1]}"
            if others
            else "there is no other checkpoint, so the run starts over"
        )
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


def _steps(folder: Path) -> dict[int, Path]:
    matches = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in folder.glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in matches if match and (path / STATE).is_file()))


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither infinity nor NaN: the best score of a run without evaluations is null, and so is the loss of a batch that
    gave none."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
