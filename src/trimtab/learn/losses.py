"""Policy losses, one value a token, to be minimised. No sums and no means here: `aggregate` gives the weights.

With r_t = pi(token) / pi_old(token), A the advantage, and clip(r) = r kept in [1 - low, 1 + high]:

    clip        -min(r_t A, clip(r_t) A)        PPO, Schulman et al. 2017, arXiv 1707.06347
                dual clip: for A < 0 the objective is kept above dual * A, Ye et al. 2020, arXiv 1912.09729
    sequence_clip   the same with the product of r_t over the sequence, the ratio of the whole completion, in the place of r_t
                                                RLOO, Ahmadian et al. 2024, arXiv 2402.14740, as TRL takes it off policy
    gspo        the same with s = (product of r_t over the sequence)^(1 / length) in the place of r_t
                                                Zheng et al. 2025, arXiv 2507.18071
    cispo       -stop_gradient(clip(r_t)) A log pi
                                                MiniMax-M1 2025, arXiv 2506.13585
    on_policy   -A log pi                       REINFORCE, Williams 1992

All have one signature. `advantages` is per token. `sequence` [T] int64 numbers each token's sequence from 0 to
`sequences` - 1; only gspo and sequence_clip read it, and a sequence must then be whole within the call. `clipped` marks the
tokens where a bound took the place of the ratio; in clip, sequence_clip and gspo these have no gradient. `ratio` and `clipped`
are detached.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trimtab.config.learn import LossName
from trimtab.learn.segments import size_by, sum_by

MAX_LOG_RATIO = 20.0
"""Ratios stay within e^-20 .. e^20, past which they mean nothing, so that none overflows into a NaN gradient."""


class PolicyLoss(NamedTuple):
    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class LossFunction(Protocol):
    def __call__(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        low: float,
        high: float,
        dual: float | None = None,
        *,
        sequence: Tensor | None = None,
        sequences: int = 0,
    ) -> PolicyLoss: ...


def clip_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
    *,
    sequence: Tensor | None = None,
    sequences: int = 0,
) -> PolicyLoss:
    return _clipped_objective(_exp(logp - old_logp), advantages, low, high, dual)


def sequence_clip_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
    *,
    sequence: Tensor | None = None,
    sequences: int = 0,
) -> PolicyLoss:
    """The ratio of token t is stop_gradient(R / pi_t) * pi_t, R the ratio of the sequence: its gradient is R * d log pi_t, and
    the sum of these over a sequence is dR. A token's loss has 1 / length of the value, so summed over a sequence (the aggregate
    sequence_sum) value and gradient are those of the sequence-level objective."""
    assert sequence is not None, "sequence_clip needs the sequence number of each token"
    assert dual is None, "sequence_clip has no dual clip"
    total = sum_by((logp - old_logp).detach(), sequence, sequences)
    found = _clipped_objective(_exp(total[sequence] + (logp - logp.detach())), advantages, low, high, None)
    share = 1 / size_by(sequence, sequences)[sequence]
    return found._replace(loss=found.loss - (1 - share) * found.loss.detach())


def gspo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
    *,
    sequence: Tensor | None = None,
    sequences: int = 0,
) -> PolicyLoss:
    """The ratio of token t is stop_gradient(s / pi_t) * pi_t: its value is s, its gradient s * d log pi_t.

    The mean of these gradients over a sequence is s * mean_t(d log pi_t) = ds, so averaged over its tokens this is
    exactly the sequence-level objective; per-token advantages have a meaning too (the paper's GSPO-token).
    """
    assert sequence is not None, "gspo needs the sequence number of each token"
    log_ratio = (logp - old_logp).detach()
    mean = sum_by(log_ratio, sequence, sequences) / size_by(sequence, sequences).clamp(min=1)
    return _clipped_objective(_exp(mean[sequence] + (logp - logp.detach())), advantages, low, high, dual)


def cispo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
    *,
    sequence: Tensor | None = None,
    sequences: int = 0,
) -> PolicyLoss:
    assert dual is None, "cispo clips the weight, not the objective: there is no dual clip"
    ratio = _exp((logp - old_logp).detach())
    weight = ratio.clamp(1 - low, 1 + high)
    return PolicyLoss(-weight * advantages * logp, ratio, weight != ratio)


def on_policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
    *,
    sequence: Tensor | None = None,
    sequences: int = 0,
) -> PolicyLoss:
    """Has no ratio in it, so nothing is clipped; the ratio is returned to be watched."""
    assert dual is None, "on_policy clips nothing: there is no dual clip"
    ratio = _exp((logp - old_logp).detach())
    return PolicyLoss(-advantages * logp, ratio, torch.zeros_like(ratio, dtype=torch.bool))


LOSSES: dict[LossName, LossFunction] = {
    "clip": clip_loss,
    "sequence_clip": sequence_clip_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "on_policy": on_policy_loss,
}


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped_objective(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None) -> PolicyLoss:
    free = ratio * advantages
    bound = ratio.detach().clamp(1 - low, 1 + high) * advantages
    clipped = bound < free
    if dual is not None:
        # Only a negative advantage can fall below this floor: the clip already bounds the objective of a positive one.
        floor = dual * advantages
        below = (advantages < 0) & (floor > torch.where(clipped, bound, free))
        bound = torch.where(below, floor, bound)
        clipped = clipped | below
    # Not torch.min: inside the bounds both branches are equal, and min would share the gradient out between them.
    return PolicyLoss(-torch.where(clipped, bound, free), ratio.detach(), clipped)
