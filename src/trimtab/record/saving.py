"""How a checkpoint comes to be: whole or not at all, by one process or by many.

    pending = PendingCheckpoint(run_dir, state, keep)       the driver, while training waits: what is saved is fixed here
    written = write_part(pending.open(), part)              every rank, at once, behind the training
    pending.finish([written, ...])                          the driver, when all have answered

A kill anywhere leaves the checkpoint before it, or the new one, and nothing in between. What a disk or a folder can do to a write
becomes a TrainingError that names the newest complete checkpoint, after what was half written is removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trimtab.base.errors import DivergedError, TrainingError, is_no_space
from trimtab.base.files import aside_of, clear, fsync, put_in_place, write_json
from trimtab.model.folder import WEIGHTS_FILE, other_files
from trimtab.record.checkpoint import (
    FILES,
    FORMAT,
    SHARDS,
    TABLES,
    checkpoints,
    folder_is_gone,
    newest_checkpoint,
    prune,
    write_state,
)
from trimtab.record.checksums import Sum, sums_of
from trimtab.record.layout import CONFIG
from trimtab.record.part import CheckpointPart, NotFinite, PartWritten, Stateful, collect, refuse_not_finite, write_part
from trimtab.record.run_state import RunState

INDEX = f"{WEIGHTS_FILE}.index.json"


class PendingCheckpoint:
    """A checkpoint that is being written, as the driver sees it. The state is copied: the run may go on with its own."""

    def __init__(self, run_dir: Path, state: RunState, keep: int, files: Mapping[str, bytes] | None = None) -> None:
        """`keep`: how many of the newest are left besides the best. `files`: what the driver has to add."""
        self.run_dir, self.step, self._keep, self._files = run_dir, state.step, keep, files or {}
        self._state = RunState(**asdict(state))
        self._had_config = (run_dir / CONFIG).exists()
        self._target = run_dir / "checkpoints" / f"step-{state.step}"

    def open(self) -> Path:
        """The folder that all parts are written to, empty."""
        folder, aside = self._target.parent, aside_of(self._target)
        folder.mkdir(exist_ok=True)
        clear(folder)
        aside.mkdir()
        return aside

    def finish(self, parts: Sequence[PartWritten]) -> Path:
        """All parts are on disk: make them a checkpoint, and remove what is neither among the newest nor the best."""
        aside = aside_of(self._target)
        files: dict[str, Sum] = {name: found for part in parts for name, found in part.files.items()}
        for name, found in files.items():
            size = (aside / name).stat().st_size  # another host's may not be here, where no disk is shared
            if size != found["bytes"]:
                raise OSError(f"{aside / name} has {size:,} bytes; {found['bytes']:,} were written")
        own = list(self._files)
        for name, data in self._files.items():
            (aside / name).write_bytes(data)
            fsync(aside / name)
        if self._had_config:
            shutil.copy(self.run_dir / CONFIG, aside)
            own.append(CONFIG)
        weights = {tensor: file for part in parts for file, names in part.weights.items() for tensor in names}
        if len(set(weights.values())) > 1:
            total = sum(part.weight_bytes for part in parts)
            write_json(aside / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))})
            own.append(INDEX)
        shards: dict[str, dict[str, Any]] = {}
        for part in parts:
            for whole, shares in part.shards.items():
                shards.setdefault(whole, {}).update(shares)
        tables = {name: table for part in reversed(parts) for name, table in part.tables.items()}
        rows = {name: [asdict(place) for place in table] for name, table in tables.items()}
        of_files = {FILES: dict(sorted((files | sums_of(aside, own)).items())), TABLES: rows}
        write_state(aside, self._state, {"format": FORMAT, **of_files, **({SHARDS: shards} if shards else {})})
        put_in_place(aside, self._target)
        fsync(self.run_dir)  # the first checkpoint makes a folder there
        prune(self.run_dir, self._keep, self._state.best_step)
        return self._target

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn what a disk or a folder can do to a checkpoint into a TrainingError, after removing what was half written."""
        run_dir = self.run_dir
        try:
            yield
        except Exception as error:
            if not (isinstance(error, OSError) or is_no_space(error) or "os error" in str(error)):
                raise
            with suppress(OSError):
                clear(run_dir / "checkpoints")
            if not run_dir.exists() or (self._had_config and not (run_dir / CONFIG).exists()):
                for made_again in (run_dir / "checkpoints", run_dir):
                    with suppress(OSError):
                        made_again.rmdir()
                raise folder_is_gone(run_dir, self.step) from error
            raise TrainingError(_why_not_written(run_dir, self.step, error)) from error


def refuse_diverged(part: CheckpointPart, run_dir: Path, step: int) -> None:
    """Values that are not finite replace none that are."""
    try:
        refuse_not_finite(part)
    except NotFinite as found:
        newest = newest_checkpoint(run_dir)
        kept = "There is no earlier checkpoint" if newest is None else f"{newest.name} is intact"
        critic = found.file.startswith("critic")
        what, rate = (f"{found.file}: {found.name}", "learn.critic.lr") if critic else (found.name, "learn.lr")
        raise DivergedError(
            f"step {step} is not saved: {what} holds values that are not finite, because the update was too large. {kept}. Lower "
            f"{rate} or learn.max_grad_norm."
        ) from None


def write_checkpoint(pending: PendingCheckpoint, part: CheckpointPart) -> Path:
    """Write a checkpoint that has one part."""
    with pending.explaining():
        return pending.finish([write_part(pending.open(), part)])


def save_checkpoint(
    run_dir: Path,
    state: RunState,
    model: Any,
    tokenizer: Any,
    optimizer: Stateful,
    keep: int,
    others: Mapping[str, Mapping[str, torch.Tensor] | Stateful] | None = None,
) -> Path:
    """Write `step-N` while the caller waits. `others`: what is in more files."""
    part = collect(model, optimizer, others, other_files(model, tokenizer))
    refuse_diverged(part, run_dir, state.step)
    return write_checkpoint(PendingCheckpoint(run_dir, state, keep), part)


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
