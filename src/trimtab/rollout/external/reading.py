"""The engine's side of the weights that a trainer publishes (weights.py). Needs nothing but torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import cast

import torch

from trimtab.rollout.external.ipc import OpenedAllocations
from trimtab.rollout.external.messages import Weight, Weights


class Reader:
    """Sees what was last published where it lies."""

    def __init__(self) -> None:
        self._opened = OpenedAllocations()
        self._weights = Weights(())

    def take(self, weights: Weights) -> None:
        """Read these from now on; `NotShared` where this process cannot see them, and then the ones before stay."""
        self._opened.only(weights.handles)
        self._weights = weights

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views by name."""
        weights = self._weights
        if weights.file is None:
            for entry in weights.layout:
                handle = weights.handles[entry.handle]
                yield entry.name, view(self._opened.bytes_of(handle, entry.offset, count(entry)), entry)
        else:
            size = os.path.getsize(weights.file)
            found = torch.from_file(weights.file, shared=True, size=size, dtype=torch.uint8)
            for entry in weights.layout:
                yield entry.name, view(found[entry.offset : entry.offset + count(entry)], entry)


def count(entry: Weight) -> int:
    """Bytes."""
    return torch.Size(entry.shape).numel() * dtype(entry).itemsize


def dtype(entry: Weight) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, entry.dtype))


def view(bytes_: torch.Tensor, entry: Weight) -> torch.Tensor:
    return bytes_.view(dtype(entry)).view(entry.shape)
