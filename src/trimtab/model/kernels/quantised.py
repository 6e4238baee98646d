"""Products with weights in codes (model/codes.py), on a device that has Triton.

`product` makes each tile of the weight from its codes where it is multiplied, so that codes and scales are all that is read: for
decode steps, which wait for weights. `dequantise` makes a whole matrix, for products of many rows. Both round the product of code
and scale to the type of the input before anything is multiplied, so they give the same numbers up to the order of sums, and those
of the plain code for a CPU.

Shapes: T rows, K the inner dimension, N outputs; O rows and I columns of the weight.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from trimtab.model.kernels.e4m3 import from_e4m3
from trimtab.model.sizes import FOUR_BIT_BLOCK


class Codes(Protocol):
    """What a kernel reads of a `QuantisedLinear`."""

    kind: Any
    in_features: int
    out_features: int
    block: tuple[int, int]
    weight: torch.Tensor
    scale: torch.nn.Parameter
    levels: Any


MAX_ROWS = 128
"""Rows up to which tiles are made in the product. Not measured yet: it is what the product of a few plain rows has."""


@triton.jit
def _weight(
    W,
    SCALE,
    LEVELS,
    o,
    i,
    O: tl.constexpr,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Elements (o, i) of the weight in float32, 0 outside. `o` and `i` broadcast."""
    inside = (o < O) & (i < I)
    if KIND == 8:
        wide: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
        code = tl.load(W + o.to(tl.int64) * I + i, mask=inside, other=0).to(tl.int32)
        scale = tl.load(SCALE + (o // ROWS) * wide + i // COLUMNS, mask=inside, other=0.0)
        return from_e4m3(code) * scale
    at = o.to(tl.int64) * I + i
    pair = tl.load(W + at // 2, mask=inside, other=0).to(tl.int32)
    code = tl.where(at % 2 == 0, pair >> 4, pair & 15)
    scale = tl.load(SCALE + at // ROWS, mask=inside, other=0.0)
    return tl.load(LEVELS + code) * scale


@triton.jit
def _product(
    X, W, SCALE, LEVELS, OUT, T, stride_x, stride_out, O: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, KIND: tl.constexpr, BACK: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """OUT = X W^T, or with BACK X W."""
    K: tl.constexpr = O if BACK else I
    N: tl.constexpr = I if BACK else O
    t = tl.program_id(1) * BT + tl.arange(0, BT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    dtype: tl.constexpr = X.dtype.element_ty
    acc = tl.zeros([BT, BN], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(
            X + t.to(tl.int64)[:, None] * stride_x + k[None, :], mask=(t < T)[:, None] & (k < K)[None, :], other=0.0
        )
        if BACK:
            w = _weight(W, SCALE, LEVELS, k[:, None], n[None, :], O, I, ROWS, COLUMNS, KIND)
        else:
            w = _weight(W, SCALE, LEVELS, n[None, :], k[:, None], O, I, ROWS, COLUMNS, KIND)
        acc = tl.dot(x, w.to(dtype), acc, input_precision="ieee")
    inside = (t < T)[:, None] & (n < N)[None, :]
    tl.store(OUT + t.to(tl.int64)[:, None] * stride_out + n[None, :], acc.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _dequantise(
    W, SCALE, LEVELS, OUT, O: tl.constexpr, I: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    o, i = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BK + tl.arange(0, BK)
    w = _weight(W, SCALE, LEVELS, o[:, None], i[None, :], O, I, ROWS, COLUMNS, KIND)
    inside = (o < O)[:, None] & (i < I)[None, :]
    tl.store(OUT + o.to(tl.int64)[:, None] * I + i[None, :], w.to(OUT.dtype.element_ty), mask=inside)


def product(linear: Codes, x_TK: torch.Tensor, out_TN: torch.Tensor | None = None, back: bool = False) -> torch.Tensor:
    """x W^T; with `back` x W."""
    assert x_TK.stride(1) == 1
    outputs = linear.in_features if back else linear.out_features
    out = x_TK.new_empty((x_TK.shape[0], outputs)) if out_TN is None else out_TN
    rows = min(64, max(16, triton.next_power_of_2(x_TK.shape[0])))
    wide = 64
    _product[(triton.cdiv(outputs, wide), triton.cdiv(x_TK.shape[0], rows))](
        x_TK, linear.weight, linear.scale, _levels(linear), out, x_TK.shape[0], x_TK.stride(0), out.stride(0),
        **_sizes(linear), BACK=back, BT=rows, BN=wide, BK=64, num_warps=4,
    )  # fmt: skip
    return out


def dequantise(linear: Codes, dtype: torch.dtype) -> torch.Tensor:
    """The whole weight."""
    out = torch.empty((linear.out_features, linear.in_features), dtype=dtype, device=linear.weight.device)
    high, wide = 16, 128
    grid = (triton.cdiv(linear.out_features, high), triton.cdiv(linear.in_features, wide))
    _dequantise[grid](
        linear.weight, linear.scale, _levels(linear), out, **_sizes(linear), BN=high, BK=wide, num_warps=4
    )
    return out


def _levels(linear: Codes) -> torch.Tensor:
    return linear.levels if linear.kind == "4bit" else linear.scale


def _sizes(linear: Codes) -> dict[str, Any]:
    eight = linear.kind == "fp8"
    rows, columns = linear.block if eight else (FOUR_BIT_BLOCK, 1)
    return {
        "O": linear.out_features, "I": linear.in_features, "ROWS": rows, "COLUMNS": columns, "KIND": 8 if eight else 4,
    }  # fmt: skip
