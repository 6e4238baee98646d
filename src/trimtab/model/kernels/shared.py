"""What kernels of the engine and of the trainer have in common: how a norm applies its weight, and activations.

Shapes: B tokens, F feed-forward size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.model.kernels.chain import follow, launch_options
from trimtab.model.norms import HeadNorm


@triton.jit
def weighted(x, weight, dtype: tl.constexpr, KIND: tl.constexpr):
    """A normalised float32 value times its weight, rounded where the model rounds."""
    if KIND == 1:
        return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
    if KIND == 3:
        return (x * (1.0 + weight.to(tl.float32))).to(dtype).to(tl.float32)
    return (x * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def normalised(x, e, eps, E: tl.constexpr, KIND: tl.constexpr):
    """A float32 row of E values at unit scale, and the scale that made it so."""
    if KIND == 4:
        x = tl.where(e < E, x - tl.sum(x, 0) / E, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    return x * scale, scale


@triton.jit
def partner(d, RD: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """The dimension that d turns together with."""
    half: tl.constexpr = RD // 2
    if NEIGHBOURS:
        return tl.where(d < RD, d ^ 1, d)
    return tl.where(d < half, d + half, tl.where(d < RD, d - half, d))


@triton.jit
def turns_back(d, RD: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Whether d takes its partner with a minus."""
    half: tl.constexpr = RD // 2
    if NEIGHBOURS:
        return d % 2 == 0
    return d < half


@triton.jit
def _whole_norm(
    X, OUT, W, SCALES, eps, stride, offset, E: tl.constexpr, EP: tl.constexpr, KIND: tl.constexpr, CHAIN: tl.constexpr
):  # fmt: skip
    """The norm of a slice of each row."""
    follow(CHAIN)
    t, e = tl.program_id(0).to(tl.int64), tl.arange(0, EP)
    dtype: tl.constexpr = X.dtype.element_ty
    at = t * stride + offset + e
    x, scale = normalised(tl.load(X + at, mask=e < E, other=0.0).to(tl.float32), e, eps, E, KIND)
    tl.store(SCALES + t, scale)
    tl.store(OUT + at, weighted(x, tl.load(W + e, mask=e < E, other=0.0), dtype, KIND).to(dtype), mask=e < E)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """SiLU (0) or GELU by tanh (1) of a float32."""
    if ACT == 0:
        return x * tl.sigmoid(x)
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)


@triton.jit
def _gated(X, OUT, F: tl.constexpr, N: tl.constexpr, ACT: tl.constexpr, CHAIN: tl.constexpr):
    """act(gate) * up, where a row holds gate and then up."""
    follow(CHAIN)
    b = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * N + tl.arange(0, N)
    dtype: tl.constexpr = X.dtype.element_ty
    gate = tl.load(X + b * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(X + b * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    gate = activate(gate, ACT).to(dtype).to(tl.float32)
    tl.store(OUT + b * F + f, (gate * up).to(dtype), mask=f < F)


def warps_for(size: int) -> int:
    """Number of warps for a program that holds this many elements of a row."""
    return 4 if size <= 2048 else 8


def whole_norms(qkv_TX: torch.Tensor, norm: HeadNorm, out_TX: torch.Tensor, scales_2T: torch.Tensor) -> None:
    """Queries, and keys, normalised over all heads together; values are left alone. `out` may be `qkv`."""
    offset = 0
    for weight, scales in zip((norm.query, norm.key), scales_2T):
        size = weight.shape[0]
        block = triton.next_power_of_2(size)
        _whole_norm[(qkv_TX.shape[0],)](
            qkv_TX, out_TX, weight, scales, norm.eps, qkv_TX.stride(0), offset, E=size, EP=block, KIND=norm.kind,
            num_warps=warps_for(block), **launch_options(),
        )  # fmt: skip
        offset += size


def gated(x_B2F: torch.Tensor, out_BF: torch.Tensor, activation: int) -> None:
    size = out_BF.shape[1]
    block = min(1024, triton.next_power_of_2(size))
    _gated[(out_BF.shape[0], triton.cdiv(size, block))](
        x_B2F, out_BF, F=size, N=block, ACT=activation, num_warps=4, **launch_options()
    )
