"""The small steps between a layer's matrix products, one launch each: residual sum with norms, activation, embedding.

Values are rounded to the model's type where transformers' modules round them, but for the residual, which is kept in float32:
the trainer's rounding of it is then the only one between what is sampled and what is trained.

Shapes: B tokens, E hidden size, F feed-forward size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.model.kernels.chain import follow, launch_options
from trimtab.model.kernels.shared import normalised, warps_for, weighted
from trimtab.model.norms import Norm


@triton.jit
def _rms(x, e, W, eps, E: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr):
    x, _ = normalised(x, e, eps, E, KIND)
    return weighted(x, tl.load(W + e, mask=e < E, other=0.0), dtype, KIND)


@triton.jit(do_not_specialize=["rows"])
def _residual(
    X, RES, OUT, POST, PRE, rows, post_eps, pre_eps, factor, E: tl.constexpr, EP: tl.constexpr, PARTS: tl.constexpr,
    SCALE: tl.constexpr, POST_KIND: tl.constexpr, PRE_KIND: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """residual += factor * post_norm(sum of x); out = pre_norm(residual). Norms whose kind is 0 are absent."""
    follow(CHAIN)
    b = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    dtype: tl.constexpr = OUT.dtype.element_ty
    residual = tl.load(RES + b * E + e, mask=e < E, other=0.0)
    if PARTS > 0:
        x = tl.load(X + b * E + e, mask=e < E, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            x += tl.load(X + (part * rows + b) * E + e, mask=e < E, other=0.0)
        x = x.to(dtype).to(tl.float32)
        if POST_KIND > 0:
            x = _rms(x, e, POST, post_eps, E, dtype, POST_KIND)
        if SCALE:
            x = (x * factor).to(dtype).to(tl.float32)
        residual += x
        tl.store(RES + b * E + e, residual, mask=e < E)
    if PRE_KIND > 0:
        residual = _rms(residual, e, PRE, pre_eps, E, dtype, PRE_KIND)
    tl.store(OUT + b * E + e, residual.to(dtype), mask=e < E)


@triton.jit
def _embed(
    TABLE, INDEX, TOKENS, RES, factor, E: tl.constexpr, EP: tl.constexpr, SCALE: tl.constexpr, CHAIN: tl.constexpr
):  # fmt: skip
    """Embedding of the newest token of each entry's row."""
    follow(CHAIN)
    b = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    token = tl.load(TOKENS + tl.load(INDEX + b)).to(tl.int64)
    x = tl.load(TABLE + token * E + e, mask=e < E, other=0.0)
    if SCALE:
        x = (x.to(tl.float32) * factor).to(x.dtype)
    tl.store(RES + b * E + e, x.to(tl.float32), mask=e < E)


def residual_norm(
    residual_BE: torch.Tensor, x_SBE: torch.Tensor | None, out_BE: torch.Tensor, pre: Norm | None,
    post: Norm | None = None, factor: float = 1.0,
) -> None:  # fmt: skip
    """Add `x` ([B, E], or [S, B, E] parts of a sum; normalised by `post`, times `factor`) to the residual in place, and write
    the residual to `out`, normalised by `pre` where there is such a norm."""
    parts = 0 if x_SBE is None else x_SBE.shape[0] if x_SBE.ndim == 3 else 1
    size = residual_BE.shape[1]
    block = triton.next_power_of_2(size)
    _residual[(residual_BE.shape[0],)](
        residual_BE if x_SBE is None else x_SBE, residual_BE, out_BE, post.weight if post else residual_BE,
        pre.weight if pre else residual_BE, residual_BE.shape[0], post.eps if post else 0.0, pre.eps if pre else 0.0,
        factor, E=size, EP=block, PARTS=parts, SCALE=factor != 1.0, POST_KIND=post.kind if post else 0,
        PRE_KIND=pre.kind if pre else 0, num_warps=warps_for(block), **launch_options(),
    )  # fmt: skip


def embed(
    table_VE: torch.Tensor, index_B: torch.Tensor, tokens_R: torch.Tensor, out_BE: torch.Tensor, factor: float
) -> None:
    size = out_BE.shape[1]
    block = triton.next_power_of_2(size)
    _embed[(out_BE.shape[0],)](
        table_VE, index_B, tokens_R, out_BE, factor, E=size, EP=block, SCALE=factor != 1.0, num_warps=warps_for(block),
        **launch_options(),
    )  # fmt: skip
