"""The small steps between the matrix products of a decoder layer, forward and backward, one launch each.

The residual and its gradient are float32; everything else has the model's type and is rounded where transformers' modules round.
Gradients of norm weights are summed by a fixed number of programs, each over every P-th token in order, and the sums of the
programs are added up in order: the same input gives the same bits.

Shapes: T tokens, E hidden size, F feed-forward size, H query heads, K key/value heads, D head size, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.model.kernels.shared import (
    activate,
    normalised,
    partner,
    turns_back,
    warps_for,
    weighted,
    whole_norms,
)
from trimtab.model.norms import HeadNorm, Norm, Rotary
from trimtab.model.sizes import TOKEN_SUM_PROGRAMS


@triton.jit
def _factors(w, KIND: tl.constexpr):
    """What a norm multiplies the normalised value by."""
    w = w.to(tl.float32)
    return 1.0 + w if KIND == 3 else w


@triton.jit
def _add_norm(
    RES, X, OUT_RES, OUT, POST, PRE, SCALES, POST_SCALES, post_eps, pre_eps, factor, E: tl.constexpr, EP: tl.constexpr,
    HAS_RES: tl.constexpr, FACTOR: tl.constexpr, POST_KIND: tl.constexpr, PRE_KIND: tl.constexpr,
):  # fmt: skip
    """residual + factor * post_norm(x), and its pre_norm."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    dtype: tl.constexpr = OUT.dtype.element_ty
    x = tl.load(X + t * E + e, mask=e < E, other=0.0).to(tl.float32)
    if POST_KIND > 0:
        x, scale = normalised(x, e, post_eps, E, POST_KIND)
        tl.store(POST_SCALES + t, scale)
        x = weighted(x, tl.load(POST + e, mask=e < E, other=0.0), dtype, POST_KIND)
    if FACTOR:
        x = (x * factor).to(dtype).to(tl.float32)
    if HAS_RES:
        x += tl.load(RES + t * E + e, mask=e < E, other=0.0)
    tl.store(OUT_RES + t * E + e, x, mask=e < E)
    if PRE_KIND > 0:
        x, scale = normalised(x, e, pre_eps, E, PRE_KIND)
        tl.store(SCALES + t, scale)
        x = weighted(x, tl.load(PRE + e, mask=e < E, other=0.0), dtype, PRE_KIND)
    tl.store(OUT + t * E + e, x.to(dtype), mask=e < E)


@triton.jit
def _norm(RES, OUT, PRE, eps, E: tl.constexpr, EP: tl.constexpr, KIND: tl.constexpr):
    """The second half of `_add_norm`."""
    t, e = tl.program_id(0).to(tl.int64), tl.arange(0, EP)
    dtype: tl.constexpr = OUT.dtype.element_ty
    x, _ = normalised(tl.load(RES + t * E + e, mask=e < E, other=0.0), e, eps, E, KIND)
    y = weighted(x, tl.load(PRE + e, mask=e < E, other=0.0), dtype, KIND)
    tl.store(OUT + t * E + e, y.to(dtype), mask=e < E)


@triton.jit(do_not_specialize=["tokens"])
def _add_norm_back(
    DY, DRES, OUT_RES, X, POST, PRE, SCALES, POST_SCALES, OUT_DRES, DX, DPRE, DPOST, tokens, factor, E: tl.constexpr,
    EP: tl.constexpr, HAS_RES: tl.constexpr, HAS_DRES: tl.constexpr, POST_KIND: tl.constexpr, PRE_KIND: tl.constexpr,
):  # fmt: skip
    """Gradients of the residual, of x and of both weights; `P` programs share the tokens."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, EP)
    pre = tl.zeros([EP], tl.float32)
    if PRE_KIND > 0:
        pre = _factors(tl.load(PRE + e, mask=e < E, other=0.0), PRE_KIND)
    post = pre
    if POST_KIND > 0:
        post = _factors(tl.load(POST + e, mask=e < E, other=0.0), POST_KIND)
    sum_pre, sum_post = tl.zeros([EP], tl.float32), tl.zeros([EP], tl.float32)
    for t in range(program, tokens, programs):
        at = (tl.zeros((), tl.int64) + t) * E + e
        d = tl.load(DY + at, mask=e < E, other=0.0).to(tl.float32)
        if PRE_KIND > 0:
            residual, scale = tl.load(OUT_RES + at, mask=e < E, other=0.0), tl.load(SCALES + t)
            if PRE_KIND == 4:
                residual = tl.where(e < E, residual - tl.sum(residual, 0) / E, 0.0)
            sum_pre += d * residual * scale
            g, unit = d * pre, residual * scale
            d = scale * (g - unit * (tl.sum(g * unit, 0) / E))
            if PRE_KIND == 4:
                d = d - scale * (tl.sum(g, 0) / E)
        if HAS_DRES:
            d += tl.load(DRES + at, mask=e < E, other=0.0)
        if HAS_RES:
            tl.store(OUT_DRES + at, d, mask=e < E)
        d = d * factor
        if POST_KIND > 0:
            scale = tl.load(POST_SCALES + t)
            unit = tl.load(X + at, mask=e < E, other=0.0).to(tl.float32) * scale
            sum_post += d * unit
            g = d * post
            d = scale * (g - unit * (tl.sum(g * unit, 0) / E))
        tl.store(DX + at, d.to(DX.dtype.element_ty), mask=e < E)
    if PRE_KIND > 0:
        tl.store(DPRE + program * E + e, sum_pre, mask=e < E)
    if POST_KIND > 0:
        tl.store(DPOST + program * E + e, sum_post, mask=e < E)


@triton.jit
def _slope(x, ACT: tl.constexpr):
    """Derivative of the activation."""
    if ACT == 0:
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    inner = 2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x)
    s = tl.sigmoid(inner)
    return s + x * s * (1.0 - s) * 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)


@triton.jit
def _gated_back(X, DY, DX, OUT, F: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr):
    """Gradients of gate and up, and the product of both again."""
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * N + tl.arange(0, N)
    dtype: tl.constexpr = X.dtype.element_ty
    gate = tl.load(X + t * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(X + t * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    dy = tl.load(DY + t * F + f, mask=f < F, other=0.0).to(tl.float32)
    active = activate(gate, ACT).to(dtype).to(tl.float32)
    tl.store(OUT + t * F + f, (active * up).to(dtype), mask=f < F)
    tl.store(DX + t * 2 * F + f, (dy * up * _slope(gate, ACT)).to(dtype), mask=f < F)
    tl.store(DX + t * 2 * F + F + f, (dy * active).to(dtype), mask=f < F)


@triton.jit
def _rope(
    X, OUT, POS, COS, SIN, QN, KN, eps, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, RD: tl.constexpr, NORM: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Queries and keys of one token normalised and rotated, its values as they are."""
    t = tl.program_id(0).to(tl.int64)
    n, d = tl.arange(0, HP)[:, None], tl.arange(0, DP)[None, :]
    dtype: tl.constexpr = X.dtype.element_ty
    at = t * (H + 2 * K) * D + n * D
    real, rotated = (n < H + 2 * K) & (d < D), n < H + K
    pair = partner(d, RD, NEIGHBOURS)
    raw = tl.load(X + at + d, mask=real, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(X + at + pair, mask=real, other=0.0).to(tl.float32)
    if NORM > 0:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = weighted(x * scale, _head_weight(QN, KN, n, d, H, D), dtype, NORM)
        y = weighted(y * scale, _head_weight(QN, KN, n, pair, H, D), dtype, NORM)
    pos = tl.load(POS + t)
    cos = tl.load(COS + pos * RD + d, mask=d < RD, other=1.0).to(tl.float32)
    sin = tl.load(SIN + pos * RD + d, mask=d < RD, other=0.0).to(tl.float32)
    x = (x * cos).to(dtype).to(tl.float32) + (tl.where(turns_back(d, RD, NEIGHBOURS), -y, y) * sin).to(dtype).to(
        tl.float32
    )
    tl.store(OUT + at + d, tl.where(rotated, x.to(dtype), raw), mask=real)


@triton.jit
def _head_weight(QN, KN, n, d, H: tl.constexpr, D: tl.constexpr):
    query = tl.load(QN + d, mask=d < D, other=0.0)
    return tl.where(n < H, query, tl.load(KN + d, mask=d < D, other=0.0))


@triton.jit
def _of_three(Q, K_, V, t, n, d, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """Token t's queries, keys and values, one head below the other, from three tensors."""
    t = tl.zeros((), tl.int64) + t
    inside = d < D
    query = tl.load(Q + (t * H + n) * D + d, mask=inside & (n < H), other=0.0)
    key = tl.load(K_ + (t * K + n - H) * D + d, mask=inside & (n >= H) & (n < H + K), other=0.0)
    value = tl.load(V + (t * K + n - H - K) * D + d, mask=inside & (n >= H + K) & (n < H + 2 * K), other=0.0)
    return query + key + value


@triton.jit(do_not_specialize=["tokens"])
def _rope_back(
    X, DQ, DK, DV, DX, POS, COS, SIN, QN, KN, DQN, DKN, tokens, eps, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, RD: tl.constexpr, NORM: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Gradient of what `_rope` read; `P` programs share the tokens."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    n, d = tl.arange(0, HP)[:, None], tl.arange(0, DP)[None, :]
    real, rotated = (n < H + 2 * K) & (d < D), n < H + K
    pair = partner(d, RD, NEIGHBOURS)
    sum_q, sum_k = tl.zeros([DP], tl.float32), tl.zeros([DP], tl.float32)
    for t in range(program, tokens, programs):
        at = (tl.zeros((), tl.int64) + t) * (H + 2 * K) * D + n * D
        raw = _of_three(DQ, DK, DV, t, n, d, H, K, D)
        pos = tl.load(POS + t)
        cos = tl.load(COS + pos * RD + d, mask=d < RD, other=1.0).to(tl.float32)
        # x_d also enters its partner's output, times the partner's sine: plus for the first half, minus for the second.
        sin = tl.load(SIN + pos * RD + pair, mask=d < RD, other=0.0).to(tl.float32)
        other = _of_three(DQ, DK, DV, t, n, pair, H, K, D).to(tl.float32) * sin
        g = raw.to(tl.float32) * cos + tl.where(turns_back(d, RD, NEIGHBOURS), other, -other)
        if NORM > 0:
            x = tl.load(X + at + d, mask=real, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
            unit = x * scale
            sums = tl.where(rotated & real, g * unit, 0.0)
            sum_q += tl.sum(tl.where(n < H, sums, 0.0), 0)
            sum_k += tl.sum(tl.where(n < H, 0.0, sums), 0)
            g = g * _factors(_head_weight(QN, KN, n, d, H, D), NORM)
            g = scale * (g - unit * (tl.sum(g * unit, 1) / D)[:, None])
        tl.store(DX + at + d, tl.where(rotated, g.to(raw.dtype), raw), mask=real)
    if NORM > 0:
        d1 = tl.arange(0, DP)
        tl.store(DQN + program * D + d1, sum_q, mask=d1 < D)
        tl.store(DKN + program * D + d1, sum_k, mask=d1 < D)


@triton.jit(do_not_specialize=["tokens"])
def _whole_norm_back(
    X, DX, W, SCALES, DW, tokens, stride, offset, E: tl.constexpr, EP: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Gradient of what `_whole_norm` read, in place, and of its weight; `P` programs share the tokens."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, EP)
    weight, total = _factors(tl.load(W + e, mask=e < E, other=0.0), KIND), tl.zeros([EP], tl.float32)
    for t in range(program, tokens, programs):
        at = (tl.zeros((), tl.int64) + t) * stride + offset + e
        dy, scale = tl.load(DX + at, mask=e < E, other=0.0).to(tl.float32), tl.load(SCALES + t)
        unit = tl.load(X + at, mask=e < E, other=0.0).to(tl.float32) * scale
        total += dy * unit
        g = dy * weight
        d = scale * (g - unit * (tl.sum(g * unit, 0) / E))
        tl.store(DX + at, d.to(DX.dtype.element_ty), mask=e < E)
    tl.store(DW + program * E + e, total, mask=e < E)


@triton.jit
def _sum_copies(DY, ORDER, STARTS, OUT, W: tl.constexpr, WP: tl.constexpr):
    """The gradients of all copies of a row, in order."""
    t = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, WP)
    total = tl.zeros([WP], tl.float32)
    for i in range(tl.load(STARTS + t), tl.load(STARTS + t + 1)):
        row = tl.load(ORDER + i)
        total += tl.load(DY + row * W + w, mask=w < W, other=0.0).to(tl.float32)
    tl.store(OUT + t * W + w, total.to(OUT.dtype.element_ty), mask=w < W)


def sum_copies(dy_SX: torch.Tensor, order_S: torch.Tensor, starts_T: torch.Tensor) -> torch.Tensor:
    """[T, ...]: row t is the sum, in float32, of the rows order[starts[t]] to order[starts[t + 1] - 1]."""
    tokens, width = starts_T.shape[0] - 1, dy_SX[0].numel()
    out = dy_SX.new_empty((tokens, *dy_SX.shape[1:]))
    _sum_copies[(tokens,)](dy_SX, order_S, starts_T, out, W=width, WP=triton.next_power_of_2(width), num_warps=4)
    return out


def add_norm(
    residual_TE: torch.Tensor | None, x_TE: torch.Tensor, pre: Norm | None, post: Norm | None, factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new residual, its norm (itself where there is no `pre`), and the scales that the backward pass needs: of `pre` and of
    `post`."""
    tokens, size = x_TE.shape
    out_residual = torch.empty((tokens, size), dtype=torch.float32, device=x_TE.device)
    out, block = torch.empty_like(x_TE), triton.next_power_of_2(size)
    # Rows that begin at multiples of 16 bytes: one compilation serves them all.
    scales = torch.empty((2, -(-tokens // 4) * 4), dtype=torch.float32, device=x_TE.device)
    _add_norm[(tokens,)](
        x_TE if residual_TE is None else residual_TE, x_TE, out_residual, out, post.weight if post else x_TE,
        pre.weight if pre else x_TE, scales[0], scales[1], post.eps if post else 0.0, pre.eps if pre else 0.0, factor, E=size,
        EP=block, HAS_RES=residual_TE is not None,
        FACTOR=factor != 1.0, POST_KIND=post.kind if post else 0, PRE_KIND=pre.kind if pre else 0, num_warps=warps_for(block),
    )  # fmt: skip
    return out_residual, out, scales[0], scales[1]


def norm(residual_TE: torch.Tensor, pre: Norm | None, dtype: torch.dtype) -> torch.Tensor:
    """The norm of a residual, as `add_norm` gives it."""
    if pre is None:
        return residual_TE.to(dtype)
    tokens, size = residual_TE.shape
    out, block = torch.empty_like(residual_TE, dtype=dtype), triton.next_power_of_2(size)
    _norm[(tokens,)](residual_TE, out, pre.weight, pre.eps, E=size, EP=block, KIND=pre.kind, num_warps=warps_for(block))
    return out


def add_norm_back(
    dy_TE: torch.Tensor, dresidual_TE: torch.Tensor | None, out_residual_TE: torch.Tensor, x_TE: torch.Tensor,
    scales_T: torch.Tensor, post_scales_T: torch.Tensor, pre: Norm | None, post: Norm | None, factor: float,
    has_residual: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Gradients of the residual, of x, of the weight of `pre` and of that of `post`."""
    tokens, size = dy_TE.shape
    programs, block = min(tokens, TOKEN_SUM_PROGRAMS), triton.next_power_of_2(size)
    dx = torch.empty_like(x_TE)
    dresidual = torch.empty_like(out_residual_TE) if has_residual else None
    sums = torch.empty((2 if post else 1, programs, size), dtype=torch.float32, device=dy_TE.device)
    _add_norm_back[(programs,)](
        dy_TE, dy_TE if dresidual_TE is None else dresidual_TE, out_residual_TE, x_TE, post.weight if post else x_TE,
        pre.weight if pre else x_TE, scales_T, post_scales_T, dx if dresidual is None else dresidual, dx, sums[0], sums[-1],
        tokens, factor,
        E=size, EP=block, HAS_RES=has_residual, HAS_DRES=dresidual_TE is not None, POST_KIND=post.kind if post else 0,
        PRE_KIND=pre.kind if pre else 0, num_warps=warps_for(block),
    )  # fmt: skip
    return dresidual, dx, sums[0].sum(0) if pre else None, sums[1].sum(0) if post else None


def whole_heads(qkv_TX: torch.Tensor, norm: HeadNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys normalised over all heads together beside values as they are; and the scales for the backward pass."""
    out, scales = qkv_TX.clone(), torch.empty((2, qkv_TX.shape[0]), dtype=torch.float32, device=qkv_TX.device)
    whole_norms(qkv_TX, norm, out, scales)
    return out, scales


def whole_heads_back(
    dqkv_TX: torch.Tensor, qkv_TX: torch.Tensor, norm: HeadNorm, scales_2T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the weights for queries and keys; those of the projections take the place of `dqkv`."""
    tokens, offset, found = qkv_TX.shape[0], 0, []
    for weight, scales in zip((norm.query, norm.key), scales_2T):
        size, programs = weight.shape[0], min(tokens, TOKEN_SUM_PROGRAMS)
        block = triton.next_power_of_2(size)
        sums = torch.empty((programs, size), dtype=torch.float32, device=qkv_TX.device)
        _whole_norm_back[(programs,)](
            qkv_TX, dqkv_TX, weight, scales, sums, tokens, qkv_TX.stride(0), offset, E=size, EP=block, KIND=norm.kind,
            num_warps=warps_for(block),
        )  # fmt: skip
        found.append(sums.sum(0))
        offset += size
    return found[0], found[1]


def gated_back(x_T2F: torch.Tensor, dy_TF: torch.Tensor, activation: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of gate and up, and act(gate) * up."""
    dx, out, size = torch.empty_like(x_T2F), torch.empty_like(dy_TF), dy_TF.shape[1]
    block = min(1024, triton.next_power_of_2(size))
    _gated_back[(out.shape[0], triton.cdiv(size, block))](
        x_T2F, dy_TF, dx, out, F=size, N=block, ACT=activation, num_warps=4
    )
    return dx, out


def rope(
    qkv_TX: torch.Tensor, positions_T: torch.Tensor, heads: int, kv_heads: int, rotary: Rotary, norm: HeadNorm | None
) -> torch.Tensor:
    """[T, H + 2K, D] queries and keys ready for attention, and values, from the projections of a packed row."""
    tokens, size = qkv_TX.shape[0], qkv_TX.shape[1] // (heads + 2 * kv_heads)
    out = qkv_TX.new_empty((tokens, heads + 2 * kv_heads, size))
    _rope[(tokens,)](
        qkv_TX, out, positions_T, rotary.cos, rotary.sin, norm.query if norm else qkv_TX, norm.key if norm else qkv_TX,
        norm.eps if norm else 0.0, **_rope_sizes(heads, kv_heads, size, rotary, norm),
    )  # fmt: skip
    return out


def rope_back(
    dq_THD: torch.Tensor, dk_TKD: torch.Tensor, dv_TKD: torch.Tensor, qkv_TX: torch.Tensor | None,
    positions_T: torch.Tensor, rotary: Rotary, norm: HeadNorm | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Gradients of the projections and, where heads are normalised, of the norms' weights."""
    tokens, heads, size = dq_THD.shape
    kv_heads, programs = dk_TKD.shape[1], min(tokens, TOKEN_SUM_PROGRAMS)
    dx = dq_THD.new_empty((tokens, (heads + 2 * kv_heads) * size))
    sums = torch.empty((2, programs if norm else 0, size), dtype=torch.float32, device=dx.device)
    _rope_back[(programs,)](
        dx if qkv_TX is None else qkv_TX, dq_THD, dk_TKD, dv_TKD, dx, positions_T, rotary.cos, rotary.sin,
        norm.query if norm else dx, norm.key if norm else dx, sums[0], sums[1], tokens, norm.eps if norm else 0.0,
        **_rope_sizes(heads, kv_heads, size, rotary, norm),
    )  # fmt: skip
    if norm is None:
        return dx, None, None
    dquery, dkey = sums.sum(1)
    return dx, dquery, dkey


def _rope_sizes(heads: int, kv_heads: int, size: int, rotary: Rotary, norm: HeadNorm | None) -> dict[str, int]:
    return {
        "H": heads, "K": kv_heads, "HP": triton.next_power_of_2(heads + 2 * kv_heads), "D": size,
        "DP": triton.next_power_of_2(size), "RD": rotary.cos.shape[-1], "NORM": norm.kind if norm else 0,
        "NEIGHBOURS": rotary.neighbours, "num_warps": 4,
    }  # fmt: skip
