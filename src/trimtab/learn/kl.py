"""How far the policy has moved from the reference, and how hard to pull it back.

Per-token estimators of KL(policy || reference) from tokens the policy sampled, in nats, with d = log pi - log ref
(Schulman 2020, "Approximating KL divergence"):

    k1 = d                      unbiased, can be negative
    k2 = d^2 / 2                biased, never negative
    k3 = exp(-d) + d - 1        unbiased, never negative

As a term of the loss they differ by their gradients. k1's is grad log pi, zero on average: it does not pull at all.
k2's is d * grad log pi, on average the gradient of the KL itself. k3's is (1 - exp(-d)) * grad log pi, the same to
first order in d. In the reward only the values count.

`corrected` multiplies by r = pi / pi_old (DeepSeek-V3.2 2025, arXiv 2512.02556): a mean over tokens that the old policy drew is
then one over the policy's own, and its gradient that of the KL itself, exactly. For k1 and k3 this takes r's own gradient as
well; k2's is right without it, and would be off by d^2 / 2 grad log pi with it. k2's and k3's: r d grad log pi. TRL multiplies by
the ratio its loss has: with GSPO's loss that is the geometric mean of a sequence's ratios, here `by_sequence`.

The coefficient is fixed, or steered to a target as in Ziegler et al. 2019, arXiv 1909.08593:

    coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from trimtab.learn.segments import size_by, sum_by

EstimatorName = Literal["k1", "k2", "k3"]

MAX_ERROR = 0.2
MAX_LOG_RATIO = 20.0
"""Keeps k3's exponential finite. The policy does not draw tokens that the reference finds e^20 times likelier."""


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return (logp - ref_logp).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    gap = (ref_logp - logp).clamp(max=MAX_LOG_RATIO)
    return gap.expm1() - gap


ESTIMATORS: dict[EstimatorName, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def corrected(
    estimator: EstimatorName,
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor,
    *,
    by_sequence: bool = False,
    sequence: Tensor | None = None,
    sequences: int = 0,
) -> Tensor:
    """A token's KL as a term of the loss where the old policy drew the token. `by_sequence` needs `sequence` [T] int64, which
    numbers each token's sequence, and sequences that are whole within the call."""
    log_ratio = logp - old_logp
    if by_sequence:
        assert sequence is not None, "by_sequence needs the sequence number of each token"
        log_ratio = (sum_by(log_ratio, sequence, sequences) / size_by(sequence, sequences).clamp(min=1))[sequence]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ESTIMATORS[estimator](logp, ref_logp) * (ratio.detach() if estimator == "k2" else ratio)


@dataclass(frozen=True)
class FixedKL:
    coef: float

    def update(self, kl: float, samples: int) -> FixedKL:
        return self


@dataclass(frozen=True)
class AdaptiveKL:
    """`coef` is the whole state: save it, and construct with it to go on."""

    coef: float
    target: float
    horizon: int

    def update(self, kl: float, samples: int) -> AdaptiveKL:
        """The controller after a step of `samples` samples whose mean KL was `kl`, in the unit of `target`."""
        assert math.isfinite(kl), f"kl is {kl}"
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        # A step larger than the horizon makes one full correction; unbounded it would turn the coefficient negative.
        return replace(self, coef=self.coef * (1 + error * min(samples / self.horizon, 1.0)))


def kl_controller(coef: float, target: float | None, horizon: int) -> FixedKL | AdaptiveKL:
    return FixedKL(coef) if target is None else AdaptiveKL(coef, target, horizon)
