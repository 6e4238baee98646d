"""The critic's side of PPO, one value a token. No sums and no means here: `aggregate` gives the weights.

With V the value of now, V_old that of before the update, R the return, and clip(V) = V kept within V_old - c .. V_old + c:

    value_loss              max((V - R)^2, (clip(V) - R)^2) / 2     PPO's code, Schulman et al. 2017; without c the first alone
    explained_variance      1 - var(R - V_old) / var(R)             1: returns are known; 0: as good as their mean; below: worse
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    loss: Tensor
    clipped: Tensor
    """Where the bound took the place of the value, so that there is no gradient."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(plain / 2, torch.zeros_like(values, dtype=torch.bool))
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    held = (bounded - returns).square()
    # Where both are equal (no bound reached) the gradient is that of the value itself.
    return ValueLoss(torch.where(held > plain, held, plain) / 2, (held > plain).detach())


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """nan where returns do not vary: there is nothing to explain."""
    spread = returns.double().var(correction=0)
    if returns.numel() < 2 or float(spread) <= 1e-12:
        return float("nan")
    return float(1 - (returns.double() - values.double()).var(correction=0) / spread)
