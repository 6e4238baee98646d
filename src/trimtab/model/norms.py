"""Norms and rotations as kernels take them: tensors and how they are applied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDED, WIDE, OFFSET = 1, 2, 3
"""How a norm applies its weight (0: there is no norm): to the rounded value; in float32; in float32, one larger than stored."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm; `kind` says how its weight is applied."""

    weight: torch.Tensor
    eps: float
    kind: int


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm of each query and key head before rotation."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    kind: int


@dataclass(frozen=True)
class Rotary:
    """cos and sin of every position, [positions, rotated dimensions], as the model itself computes them."""

    cos: torch.Tensor
    sin: torch.Tensor
