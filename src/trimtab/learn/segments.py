"""Sums over the parts of a packed tensor: tokens of a sequence, samples of a group."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    """[count]: entry i is the sum of `values` where `index` is i, 0 where there are none. Differentiable."""
    return values.new_zeros(count).index_add(0, index, values)


def size_by(index: Tensor, count: int) -> Tensor:
    """[count] int64: how often each of 0 .. count-1 occurs in `index`."""
    return sum_by(torch.ones_like(index), index, count)
