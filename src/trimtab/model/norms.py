"""Norms and rotations as kernels take them: tensors and how they are applied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDED, WIDE, OFFSET, CENTRED = 1, 2, 3, 4
"""How a norm applies its weight (0: there is no norm): to the rounded value; in float32; in float32, one larger than stored; in
float32, to a value less its mean."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm; `kind` says how its weight is applied."""

    weight: torch.Tensor
    eps: float
    kind: int


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm of queries and of keys before rotation: of each head, or of all heads together."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    kind: int
    whole: bool = False
    """Of all heads together."""


@dataclass(frozen=True)
class Rotary:
    """cos and sin of every position, [positions, rotated dimensions], as the model itself computes them."""

    cos: torch.Tensor
    sin: torch.Tensor
    neighbours: bool = False
    """Neighbouring dimensions turn together; otherwise one of the first half with one of the second."""
