"""Loss scaling for float16, whose smallest numbers are where gradients of activations lie.

A step's loss is multiplied by a power of two before its backward passes, and the gradient sums, which are float32, are divided by
it after the last one: both are exact, so the scale changes nothing but what would have been rounded to 0. Every step begins with
the same scale, whatever was before it. A step whose gradient is not finite is computed again with a smaller one; nothing of it
has been applied by then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FIRST_SCALE = 2.0**16
"""What every step begins with."""
LOWER = 2.0**-3
"""What a scale that is too large is multiplied by. Numbers of float16 reach 2^16; at a scale of 1 a step is what it is."""


def first_scale(dtype: torch.dtype) -> float:
    """The scale that a step of a model of this type begins with."""
    return FIRST_SCALE if dtype == torch.float16 else 1.0


def lower_scale(scale: float) -> float:
    return max(1.0, scale * LOWER)


@torch.no_grad()
def unscale(gradients: Sequence[torch.Tensor | None], scale: float) -> bool:
    """Divide gradients by the scale; False, and nothing done, where one is not finite."""
    found = [gradient for gradient in gradients if gradient is not None]
    if found and not bool(torch.stack([gradient.isfinite().all() for gradient in found]).all()):
        return False
    for gradient in found:
        gradient.mul_(1.0 / scale)
    return True
