"""Truncated importance correction: the engine sampled with slightly other probabilities than the trainer computes.

    token       w_t = pi_trainer(t) / pi_engine(t): TIS, Yao et al. 2025, "Your efficient RL framework secretly brings
                you off-policy RL training"
    sequence    w = the product of w_t over the sequence, the same for each of its tokens

    truncate    min(w, cap): bounded variance, little bias (Ionides 2008; IMPALA, arXiv 1802.01561)
    mask        w where w <= cap, else 0: the token, or the whole sequence, is left out of the gradient

Weights multiply the per-token loss as constants. They do not enter the denominators of `aggregate`: a masked token is
a token with zero loss, so the counts stay known before the step is split.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trimtab.learn.segments import sum_by


@torch.no_grad()
def importance_weights(
    trainer_logp: Tensor,
    engine_logp: Tensor,
    level: Literal["off", "token", "sequence"],
    cap: float,
    mode: Literal["truncate", "mask"],
    *,
    sequence: Tensor,
    sequences: int,
) -> Tensor:
    """[T]. At level "sequence" every sequence must be whole within the call; `sequence` [T] int64 numbers them."""
    log_weight = trainer_logp - engine_logp
    if level == "off":
        return torch.ones_like(log_weight)
    if level == "sequence":
        log_weight = sum_by(log_weight, sequence, sequences)[sequence]
    weight = log_weight.exp()
    if mode == "truncate":
        return weight.clamp(max=cap)
    return torch.where(weight <= cap, weight, 0.0)
