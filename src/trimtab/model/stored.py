"""The tensors of a checkpoint, one at a time: found in a folder, the cache or on the hub, dequantised where they are quantised.

transformers loads most checkpoints itself (load.py). What is read here: quantised ones, as its own reading of them depends on
which kernels are installed, and those with a vision part, of which only the text is wanted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from trimtab.base.errors import ModelError
from trimtab.model.quantised import StoredTensor, in_full, stored_tensors
from trimtab.model.schemes import Scheme

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored:
    """The weights of a checkpoint in safetensors files."""

    def __init__(self, location: str, scheme: Scheme | None, dtype: torch.dtype) -> None:
        """`dtype`: what quantised weights become."""
        self.scheme, self.dtype = scheme, dtype
        self.files = _files(location)
        """By stored name: the file that has the tensor."""
        self.tensors = stored_tensors(self.files, scheme)

    def opened(self) -> dict[str, StoredSlice]:
        """The weights by their names in the model, read and dequantised when they are asked for. Files are closed when nobody
        holds them any more: where one weight is damaged, other threads may still read."""
        files = {file: safe_open(file, framework="pt") for file in {*self.files.values()}}
        return {one.name: StoredSlice(self, one, files) for one in self.tensors}


@dataclass(frozen=True)
class StoredSlice:
    """A weight in a file. `[...]` reads it, as with the slices that transformers loads from."""

    stored: Stored
    tensor: StoredTensor
    opened: Mapping[Path, Any]

    def __getitem__(self, _: Any) -> torch.Tensor:
        values, scales = self.as_stored()
        return in_full(self.tensor, values, scales, self.stored.scheme, self.stored.dtype)

    def as_stored(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values and their scales, if they have some, as the file holds them."""
        values, *scales = (self.opened[self.stored.files[name]].get_tensor(name) for name in self.tensor.parts)
        return values, scales[0] if scales else None


def _files(location: str) -> dict[str, Path]:
    index = _find(location, INDEX)
    if index is not None:
        try:
            held = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = {name: _find(location, name) for name in set(held.values())}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"model.path: {index} is damaged ({error}). Download it again.") from error
        missing = [name for name, file in shards.items() if file is None]
        if missing:
            raise ModelError(f"model.path: {location!r} lacks the file {missing[0]}. Download it again.")
        return {name: file for name, part in held.items() if (file := shards[part]) is not None}
    whole = _find(location, WEIGHTS)
    if whole is None:
        raise ModelError(
            f"model.path: {location!r} has neither {WEIGHTS} nor {INDEX}. Quantised checkpoints and those with a vision part "
            "are read from safetensors files alone."
        )
    with safe_open(whole, framework="pt") as file:
        return dict.fromkeys(file.keys(), whole)


def _find(location: str, name: str) -> Path | None:
    found = cached_file(
        location, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=True
    )
    return None if found is None else Path(found)
