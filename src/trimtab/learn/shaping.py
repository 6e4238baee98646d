"""Changes to a reward before advantages are computed.

overlong_penalty, DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476), for a completion of L tokens:

    0                                               L <= max_new_tokens - buffer
    -penalty * (L - (max_new_tokens - buffer)) / buffer     up to max_new_tokens
    -penalty                                        at max_new_tokens
"""

from __future__ import annotations

from torch import Tensor


def reward_clip(rewards: Tensor, low: float, high: float) -> Tensor:
    assert low <= high, f"empty range [{low}, {high}]"
    return rewards.clamp(low, high)


def overlong_penalty(lengths: Tensor, max_new_tokens: int, buffer: int, penalty: float) -> Tensor:
    """[N] float32, to be added to the rewards: between -penalty and 0. `lengths` is [N] int."""
    assert 0 < buffer <= max_new_tokens, f"a buffer of {buffer} tokens does not fit in {max_new_tokens}"
    into_buffer = (lengths - (max_new_tokens - buffer)).float() / buffer
    return into_buffer.clamp(0, 1) * -penalty
