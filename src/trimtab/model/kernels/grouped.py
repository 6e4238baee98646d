"""Products over experts: rows that are sorted by expert, each block of them times its own expert's matrix, one launch for all.

Where an expert's rows end is read on the device, so the host waits for nothing and a graph serves any routing. There are as many
programs as the most tiles that any routing needs; those beyond what this one needs end at once.

Shapes: S rows, G experts, I inputs, O outputs, T tokens, K experts of each token, E hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _tile_of(ENDS, tile, G: tl.constexpr, GP: tl.constexpr, BM: tl.constexpr):
    """The expert that a tile of rows belongs to (G: none), its first row and where that expert's rows end."""
    g = tl.arange(0, GP)
    ends = tl.load(ENDS + g, mask=g < G, other=0)
    starts = tl.load(ENDS + g - 1, mask=(g > 0) & (g < G), other=0)
    tiles = tl.where(g < G, (ends - starts + BM - 1) // BM, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(tl.where((last <= tile) & (g < G), 1, 0), 0)
    chosen = g == expert
    begin = tl.sum(tl.where(chosen, starts, 0), 0)
    end = tl.sum(tl.where(chosen, ends, 0), 0)
    before = tl.sum(tl.where(chosen, last - tiles, 0), 0)
    return expert, begin + (tile - before) * BM, end


@triton.jit(do_not_specialize=["rows"])
def _product(
    X, W, OUT, ENDS, rows, w_expert, w_in, w_out, G: tl.constexpr, GP: tl.constexpr, I: tl.constexpr, O: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile_of(ENDS, tl.program_id(0), G, GP, BM)
    if expert < G:
        s = first + tl.arange(0, BM)
        o = tl.program_id(1) * BN + tl.arange(0, BN)
        inside, at = s < end, s.to(tl.int64)
        weights = W + expert.to(tl.int64) * w_expert + o[None, :] * w_out
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, I, BK):
            i = k + tl.arange(0, BK)
            x = tl.load(X + at[:, None] * I + i[None, :], mask=inside[:, None] & (i[None, :] < I), other=0.0)
            w = tl.load(weights + i[:, None] * w_in, mask=(i[:, None] < I) & (o[None, :] < O), other=0.0)
            total += tl.dot(x, w, input_precision="ieee")
        tl.store(
            OUT + at[:, None] * O + o[None, :], total.to(OUT.dtype.element_ty), mask=inside[:, None] & (o[None, :] < O)
        )


@triton.jit
def _add_outer(
    TOTAL, A, B, ENDS, t_expert, t_a, t_b, NA: tl.constexpr, NB: tl.constexpr, BS: tl.constexpr, BA: tl.constexpr,
    BB: tl.constexpr,
):  # fmt: skip
    """TOTAL[g] += A[rows of g]^T B[rows of g], in float32."""
    expert = tl.program_id(0)
    begin = tl.load(ENDS + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ENDS + expert)
    if begin < end:
        a = tl.program_id(1) * BA + tl.arange(0, BA)
        b = tl.program_id(2) * BB + tl.arange(0, BB)
        total = tl.zeros([BA, BB], tl.float32)
        for first in range(begin, end, BS):
            s = first + tl.arange(0, BS)
            at = s.to(tl.int64)
            left = tl.load(A + at[:, None] * NA + a[None, :], mask=(s[:, None] < end) & (a[None, :] < NA), other=0.0)
            right = tl.load(B + at[:, None] * NB + b[None, :], mask=(s[:, None] < end) & (b[None, :] < NB), other=0.0)
            total += tl.dot(tl.trans(left), right, input_precision="ieee")
        inside = (a[:, None] < NA) & (b[None, :] < NB)
        place = TOTAL + expert.to(tl.int64) * t_expert + a[:, None] * t_a + b[None, :] * t_b
        tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)


@triton.jit
def _combine(Y, BACK, WEIGHTS, OUT, K: tl.constexpr, E: tl.constexpr, N: tl.constexpr, WEIGHTED: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for k in range(K):
        row = tl.load(BACK + t * K + k)
        y = tl.load(Y + row * E + e, mask=e < E, other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(WEIGHTS + t * K + k).to(tl.float32)
        total += y
    tl.store(OUT + t * E + e, total.to(OUT.dtype.element_ty), mask=e < E)


def product(x_SI: torch.Tensor, w_GIO: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """[S, O]: each row times the matrix of its expert, which may have any strides."""
    rows, inputs = x_SI.shape
    experts, _, outputs = w_GIO.shape
    out = x_SI.new_empty((rows, outputs))
    if rows == 0:
        return out
    tile = 16 if rows <= 16 * experts else 64 if rows <= 128 * experts else 128
    wide = 64 if tile == 16 else 128
    _product[(rows // tile + min(rows, experts), triton.cdiv(outputs, wide))](
        x_SI, w_GIO, out, ends_G, rows, *w_GIO.stride(), G=experts, GP=triton.next_power_of_2(experts), I=inputs, O=outputs,
        BM=tile, BN=wide, BK=64 if x_SI.element_size() <= 2 else 32, num_warps=8 if tile == 128 else 4,
    )  # fmt: skip
    return out


def add_outer(total_GAB: torch.Tensor, a_SA: torch.Tensor, b_SB: torch.Tensor, ends_G: torch.Tensor) -> None:
    """total[g] += a^T b over the rows of expert g. The sums are float32 and may have any strides."""
    experts, wide, high = total_GAB.shape
    tile_a, tile_b = (min(128, max(16, triton.next_power_of_2(size))) for size in (wide, high))
    _add_outer[(experts, triton.cdiv(wide, tile_a), triton.cdiv(high, tile_b))](
        total_GAB, a_SA, b_SB, ends_G, *total_GAB.stride(), NA=wide, NB=high, BS=64 if a_SA.element_size() <= 2 else 32,
        BA=tile_a, BB=tile_b, num_warps=8,
    )  # fmt: skip


def combine(y_SE: torch.Tensor, back_S: torch.Tensor, weights_TK: torch.Tensor | None, used: int) -> torch.Tensor:
    """[T, E]: the rows of each token's experts, times their weights, added up in float32."""
    tokens, size = back_S.shape[0] // used, y_SE.shape[1]
    out = y_SE.new_empty((tokens, size))
    if tokens:
        block = min(1024, triton.next_power_of_2(size))
        _combine[(tokens, triton.cdiv(size, block))](
            y_SE, back_S, back_S if weights_TK is None else weights_TK, out, K=used, E=size, N=block,
            WEIGHTED=weights_TK is not None, num_warps=4,
        )  # fmt: skip
    return out
