"""Products of a few rows with a large matrix, bound by reading the matrix: decode steps of small batches.

The matrix is read once, in tiles that enough programs stream at the same time to fill the memory bus. Where it has too few rows
for that, the sum is cut along the inner dimension into parts, which the consumer adds up in order: no atomics, so the same
input gives the same bits. Gate and up projections are computed side by side and leave as act(gate) * up.

Shapes: B rows, I inputs, O outputs, F feed-forward size, S parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trimtab.rollout.native.kernels.chain import follow, launch_options, read_ahead
from trimtab.rollout.native.kernels.layers import activate

MOST_ROWS = 64
"""Above, a product is bound by arithmetic as much as by reading, and cuBLAS is faster (docs/log.md)."""


READ_AHEAD = 32 * 1024
"""Elements of the matrix that a program asks for before its input is there."""


@triton.jit
def _skinny(
    X, W, BIAS, OUT, rows, O: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """OUT[part] = X W^T over this part's inputs; the matrix tile is the left operand, whose side is never short."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    m = tl.arange(0, BM)
    per: tl.constexpr = (I + BK * PARTS - 1) // (BK * PARTS) * BK
    lo = part * per
    hi = tl.minimum(lo + per, I)
    EVEN_I: tl.constexpr = I % (BK * PARTS) == 0
    if CHAIN:
        line = tl.minimum(lo + tl.arange(0, AHEAD) * LINE, I - 1)
        first = W + tl.minimum(n, O - 1).to(tl.int64)[:, None] * I + line[None, :]
        read_ahead(first)
        if GATED:
            read_ahead(first + O * I)
    follow(CHAIN)
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
    for start in tl.range(lo, hi, BK, num_stages=STAGES):
        k = start + tl.arange(0, BK)
        # Where tiles fit exactly there is nothing to mask, and loads are as wide as they can be.
        x_real = (m < rows)[None, :] if EVEN_I else (m < rows)[None, :] & (k < hi)[:, None]
        x = tl.load(X + m[None, :] * I + k[:, None], mask=x_real, other=0.0)
        tile = W + n.to(tl.int64)[:, None] * I + k[None, :]
        if EVEN_I and O % BN == 0:
            w = tl.load(tile)
        else:
            w = tl.load(tile, mask=(n < O)[:, None] & (k < hi)[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            if EVEN_I and O % BN == 0:
                up = tl.load(tile + O * I)
            else:
                up = tl.load(tile + O * I, mask=(n < O)[:, None] & (k < hi)[None, :], other=0.0)
            acc_up = tl.dot(up, x, acc_up, input_precision="ieee")
    dtype: tl.constexpr = X.dtype.element_ty
    if HAS_BIAS:
        first = (n < O) & (part + n * 0 == 0)  # the sum has its bias once
        acc += tl.load(BIAS + n, mask=first, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(BIAS + O + n, mask=first, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = activate(acc.to(dtype).to(tl.float32), ACT).to(dtype).to(tl.float32)
        acc = gate * acc_up.to(dtype).to(tl.float32)
    out = OUT + (part * rows + m)[None, :] * O + n[:, None]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=(n < O)[:, None] & (m < rows)[None, :])


@dataclass(frozen=True)
class Cut:
    """Outputs and inputs of a tile, parts of the sum, warps of a program, tiles in flight."""

    outputs: int
    inputs: int
    parts: int
    warps: int
    stages: int


def cut_for(outputs: int, inputs: int, gated: bool, whole: bool) -> Cut:
    """Enough programs for every multiprocessor; `whole` where the consumer does not add parts up. Measured (docs/log.md)."""
    if gated:
        return Cut(64, 64, 1, 4, 4)
    if whole:
        return Cut(16 if outputs * inputs <= 4 * 2**20 else 32, 128, 1, 4, 4)
    inner, stages = (128, 3) if inputs >= 4096 else (64, 4)
    tiles = triton.cdiv(outputs, 64)
    parts = 1
    while parts < 8 and tiles * parts < 150 and inputs // (2 * parts * inner) >= 2:
        parts *= 2
    return Cut(64, inner, parts, 4, stages)


def skinny(
    x_BI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, cut: Cut,
    activation: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Fills and returns the first [S, B, O] of `out`; with an activation the weights are gate and up, and S is 1."""
    rows, inputs = x_BI.shape
    gated = activation is not None
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert rows <= MOST_ROWS and x_BI.is_contiguous() and weight.is_contiguous() and not (gated and cut.parts > 1)
    line = 128 // weight.element_size()
    ahead = triton.next_power_of_2(max(1, min(inputs // cut.parts, READ_AHEAD // (cut.outputs * (1 + gated))) // line))
    found = out.view(-1)[: cut.parts * rows * outputs].view(cut.parts, rows, outputs)
    _skinny[(triton.cdiv(outputs, cut.outputs), cut.parts)](
        x_BI, weight, x_BI if bias is None else bias, found, rows, O=outputs, I=inputs,
        BM=max(16, triton.next_power_of_2(rows)), BN=cut.outputs, BK=cut.inputs, PARTS=cut.parts, GATED=gated,
        ACT=activation or 0, HAS_BIAS=bias is not None, STAGES=cut.stages, num_warps=cut.warps,
        AHEAD=ahead, LINE=line, **launch_options(),
    )  # fmt: skip
    return found
