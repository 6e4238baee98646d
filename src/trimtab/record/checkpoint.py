"""Checkpoints: found, read or refused, and deleted whole. safetensors and JSON, nothing pickled. How they are written: saving.py.

A checkpoint is written into a folder with another name, flushed to disk, and renamed; deleting one renames it away first. So at
any moment, a kill included, every folder called `step-N` is complete, and the newest of them resumes the run exactly.

`state.json`, written last, has the size and sha256 of every other file, and its own sha256. Optimizer state is flat tensors, one
a kind and unit of the weight store (model/weights.py); `tables` says which parameter lies where in them, so they are read
whatever the units are. In format 3, several ranks may have written shares of a file; `shards` says which elements of each unit
are in which share (shards.py). Format 2, in which every file is whole, and format 1, which has no checksums and names the state
by parameter, are read too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file

from trimtab.base.errors import ConfigError, TrainingError
from trimtab.base.files import fsync, remove_whole, write_json
from trimtab.model.memory import is_out_of_memory
from trimtab.record.checksums import Sum, refuse_other_files
from trimtab.record.host_copy import is_finite
from trimtab.record.layout import CONFIG as CONFIG
from trimtab.record.part import OPTIMIZER, Stateful
from trimtab.record.run_state import RunState as RunState
from trimtab.record.shards import StateReader, files_of

FORMAT = 3
WHOLE_FILES, BEFORE_CHECKSUMS = 2, 1
"""The formats that are still read."""
STATE = "state.json"
FACTS, WEIGHTS_MARK = "trimtab", "weights"
"""What a file of tensors of format 1 says of itself."""
FILES, TABLES, SHARDS, DIGEST = "files", "tables", "shards", "sha256"
"""What `state.json` says of the checkpoint beside the run's state, and of itself."""
MAX_COUNT = 2**62
"""No run counts as far."""


def write_state(checkpoint: Path, state: RunState, of_files: Mapping[str, Any] | None = None) -> None:
    """Write the state of a checkpoint, whole or not at all. `of_files`: its format and what its files are; None: as it says."""
    if of_files is None:
        before = _read(checkpoint)
        of_files = {key: before[key] for key in ("format", FILES, TABLES, SHARDS) if key in before}
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


def folder_is_gone(run_dir: Path, step: int) -> TrainingError:
    return TrainingError(
        f"{run_dir} was moved or deleted during the run, so step {step} is not saved. If you moved it, resume it at its new "
        "place (observe.dir)"
    )


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
    if saved.get("format") not in (BEFORE_CHECKSUMS, WHOLE_FILES, FORMAT):
        raise TrainingError(f"{checkpoint} was written by another version of Trimtab; this version cannot resume it.")
    if saved["format"] != BEFORE_CHECKSUMS and saved.get(DIGEST) != _digest(saved):
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
    """Tensors of one of a checkpoint's own files, or of all shares of it: of the checkpoint's step, and finite."""
    tensors: dict[str, torch.Tensor] = {}
    for name in files_of(file.parent, file.name, _read(file.parent)):
        share = file.with_name(name)
        _refuse_other_step(share)
        tensors |= load_file(share)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(f"{file.name}: {name} holds values that are not finite")
    return tensors


def has_part(checkpoint: Path, file: str) -> bool:
    """The checkpoint has such a file, or shares of it."""
    return all((checkpoint / name).is_file() for name in files_of(checkpoint, file, _read(checkpoint)))


def load_optimizer(checkpoint: Path, optimizer: Stateful, file: str = OPTIMIZER) -> None:
    """Make the optimizer what it was. The weights it is for are those of the checkpoint, and are loaded already."""
    with explain_load_errors(checkpoint), StateReader(checkpoint, file, _read(checkpoint)) as reader:
        facts = {} if reader.table is not None else _refuse_other_step(checkpoint / file)
        if not all(map(is_finite, optimizer.params)):
            raise ValueError("its weights hold values that are not finite")
        mark = facts.get(WEIGHTS_MARK)
        if mark is not None and mark != repr(math.fsum(largest_values(optimizer.params))):
            raise ValueError(f"its weights do not belong to {file}: they are from another step, or damaged")
        optimizer.load_state_tensors(reader.by_parameter(), None)
        optimizer.load_stretches(reader.fill_if_any)


def _refuse_other_step(file: Path) -> dict[str, Any]:
    """What a file of format 1 says beside its tensors, which are those of the checkpoint's step."""
    facts = _facts(file)
    if "step" in facts and file.parent.name != f"step-{facts['step']}":
        raise ValueError(f"{file.name} belongs to step {facts['step']}")
    return facts


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
