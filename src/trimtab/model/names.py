"""What was probably meant where a model is named that is not there. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from trimtab.base.suggestions import near_paths


def near_models(path: Path) -> str:
    """A sentence with the models near a path, or with the first folder of it that is missing; or nothing."""
    return near_paths(path, _holds_models)


def inside_run(folder: Path) -> str:
    """A sentence with the model inside a folder that is none itself: a run was named, not what it made."""
    found = [folder / "final", *sorted(folder.glob("checkpoints/step-*"), key=_step, reverse=True)]
    model = next((path for path in found if (path / "config.json").is_file()), None)
    return f" Did you mean {model}?" if model else ""


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _holds_models(entry: Path) -> bool:
    return entry.is_dir() or entry.suffix == ".gguf"
