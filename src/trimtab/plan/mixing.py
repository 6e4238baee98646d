"""Sizes of layers that carry a state from token to token: what a sequence holds, what a token keeps for the backward pass, what
it computes beyond the layer's products. No torch.

States are exact. What is kept was counted on transformers' own code, whose delta rule and scan work in float32 on chunks of
tokens: within 4 % over random sizes (tests/plan/test_hybrid_plans.py). Kernels of flash-linear-attention and mamba-ssm keep less;
the measurement at the start of a run corrects that.
"""

from __future__ import annotations

from dataclasses import dataclass

DELTA_CHUNK = 64
"""Tokens that the delta rule solves together."""


@dataclass(frozen=True)
class Mixing:
    """The part of a layer that carries a state."""

    conv: int
    """Elements of the model's type that a sequence carries for the convolution."""
    state: int
    """Elements in float32 that it carries beside them."""
    kept: int
    """Elements of the model's type that a token keeps for the backward pass."""
    kept_wide: int
    """Elements in float32 that it keeps."""
    operations: int
    """Multiplications with an addition for a token, beside the products with weights."""

    def state_bytes(self, itemsize: int) -> int:
        """Bytes that a sequence carries."""
        return self.conv * itemsize + self.state * 4

    def kept_bytes(self, itemsize: int) -> int:
        """Bytes that a token keeps for the backward pass."""
        return self.kept * itemsize + self.kept_wide * 4


def gated_delta(hidden: int, channels: int, width: int, heads: int, key: int, value: int) -> Mixing:
    """`channels` and `width` of the convolution; `heads` of values, with a state of `key` times `value` each."""
    per_chunk = key * value / DELTA_CHUNK
    kept = 0.75 * hidden + 2.8 * channels + 4.9 * heads * (key + value)
    wide = heads * (4.75 * (key + value) + 5.3 * DELTA_CHUNK + 1.1 * per_chunk)
    work = heads * (DELTA_CHUNK * (3 * key + 2 * value) + 3 * key * value)
    return Mixing(channels * width, heads * key * value, round(kept), round(wide), work)


def state_space(hidden: int, channels: int, width: int, heads: int, size: int, state: int, chunk: int) -> Mixing:
    """Mamba-2: `heads` of `size` with a state of `size` times `state` each, in chunks of so many tokens."""
    kept = hidden + 2.8 * channels
    wide = heads * (10.3 * size + 4.8 * state + 3.13 * chunk + 2.55 * size * state / chunk)
    work = heads * (chunk * (size + state) + 2 * size * state)
    return Mixing(channels * width, heads * size * state, round(kept), round(wide), work)


def short_convolution(hidden: int, channels: int, width: int) -> Mixing:
    return Mixing(channels * width, 0, 7 * hidden, 0, channels * width)
