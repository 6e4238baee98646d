"""Checkpoints as they were before format 2: optimizer state by parameter, a mark of the step in each file, no checksums."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trimtab.update.eightbit import BLOCK

NEW = ("files", "tables", "sha256")


def write_as_format_1(checkpoint: Path, step_in_files: bool = True) -> None:
    """Rewrite a checkpoint in the old layout."""
    state = json.loads((checkpoint / "state.json").read_text())
    weights = load_file(next(checkpoint / n for n in WEIGHTS if (checkpoint / n).exists()))
    mark = repr(math.fsum(float(torch.linalg.vector_norm(w, math.inf).double()) for w in weights.values()))
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        if file.name in WEIGHTS:
            continue
        if file.name in state["tables"]:
            tensors = by_parameter(tensors, state["tables"][file.name])
        facts: dict[str, Any] = {"step": state["step"]}
        if file.name == "optimizer.safetensors":
            facts["weights"] = mark
        save_file(tensors, file, {"trimtab": json.dumps(facts)} if step_in_files else None)
    old = {"format": 1, **{key: value for key, value in state.items() if key not in ("format", *NEW)}}
    (checkpoint / "state.json").write_text(json.dumps(old, indent=2) + "\n")


WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def by_parameter(tensors: dict[str, torch.Tensor], table: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    numbers: dict[str, int] = {}
    for place in table:
        unit, name, offset = place["unit"], place["name"], place["offset"]
        count = math.prod(place["shape"])
        number = numbers[unit] = numbers.get(unit, -1) + 1
        for key, row in tensors.items():
            kind, _, of = key.partition("/")
            if of != unit:
                continue
            blocks = slice(offset // BLOCK, -(-(offset + count) // BLOCK))
            if kind == "step":
                part = row[number]
            elif kind.endswith("_codes"):
                part = row[blocks.start * BLOCK : blocks.stop * BLOCK]
            elif kind.endswith("_scales"):
                part = row[blocks]
            else:
                part = row[offset : offset + count].view(place["shape"])
            found[f"{kind}/{name}"] = part.clone()
    return found
