"""What kernels of the engine and of the trainer have in common: how a norm applies its weight, and activations."""

from __future__ import annotations

import triton
import triton.language as tl


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
