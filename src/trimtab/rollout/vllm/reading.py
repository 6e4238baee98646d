"""The engine's side of the weights that a trainer publishes (weights.py). Needs nothing but torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from trimtab.rollout.vllm.messages import Weight


def read_weights(path: str, layout: Sequence[Weight]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the file."""
    size = os.path.getsize(path)
    found = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    for entry in layout:
        yield entry.name, view(found, entry)


def view(bytes_: torch.Tensor, entry: Weight) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    count = torch.Size(entry.shape).numel() * dtype.itemsize
    return bytes_[entry.offset : entry.offset + count].view(dtype).view(entry.shape)
