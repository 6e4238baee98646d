"""What kernels of the engine and of the trainer have in common: how a norm applies its weight, and activations.

Shapes: B tokens, F feed-forward size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.model.kernels.chain import follow, launch_options


@triton.jit
def weighted(x, weight, dtype: tl.constexpr, KIND: tl.constexpr):
    """A normalised float32 value times its weight, rounded where the model rounds."""
    if KIND == 1:
        return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)
    if KIND == 3:
        return (x * (1.0 + weight.to(tl.float32))).to(dtype).to(tl.float32)
    return (x * weight.to(tl.float32)).to(dtype).to(tl.float32)


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


def gated(x_B2F: torch.Tensor, out_BF: torch.Tensor, activation: int) -> None:
    size = out_BF.shape[1]
    block = min(1024, triton.next_power_of_2(size))
    _gated[(out_BF.shape[0], triton.cdiv(size, block))](
        x_B2F, out_BF, F=size, N=block, ACT=activation, num_warps=4, **launch_options()
    )
