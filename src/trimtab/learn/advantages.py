"""How much better than expected each sample was.

Rewards and groups have one entry for each sample of the whole step. Groups may have any size, because samples whose
reward failed are gone, and group numbers may have holes. With m_g and s_g the mean and standard deviation of a sample's
group, and m and s those of the step (of global_norm and group_mean_global_norm: of all its tokens, each with its sample's
value, as OpenRLHF, which is the paper's code, and verl have it):

    group_std               (r - m_g) / (s_g + eps)         GRPO, Shao et al. 2024, arXiv 2402.03300
    group_mean              r - m_g                         Dr. GRPO, Liu et al. 2025, arXiv 2503.20783
    leave_one_out           r - mean of the others          RLOO, Kool et al. 2019; Ahmadian et al. 2024, 2402.14740
    batch_mean              r - m                           REINFORCE with a baseline, Williams 1992
    global_norm             (r - m) / (s + eps)             REINFORCE++, Hu 2025, arXiv 2501.03262
    group_mean_global_norm  (x - m) / (s + eps) of x = r - m_g                      REINFORCE++-baseline, same paper
    group_mean_global_std   (r - m_g) / (std of r - m_g over all samples + eps)     TRL's RLOO with normalize_advantages
    group_mean_batch_std    (r - m_g) / (std of r over all samples + eps)           Lite PPO, Liu et al. 2025, arXiv 2508.08221

Standard deviations have the n - 1 denominator. A sample with nothing to be compared with has advantage 0, and where all
rewards compared are equal the advantages are exactly 0, not rounding noise divided by a tiny deviation.

`gae` is Schulman et al. 2015, arXiv 1506.02438, on packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.config.learn import AdvantageName
from trimtab.learn.segments import size_by, sum_by

EPS = 1e-4
"""Added to every standard deviation, as in TRL: it bounds the advantage when rewards differ by next to nothing."""


def group_std(rewards: Tensor, groups: Tensor) -> Tensor:
    return _over_std(group_mean(rewards, groups), groups)


def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    count = _count(groups)
    # Measured from the group's lowest reward, equal rewards are exact zeros and stay so through the mean.
    above = rewards - _extreme(rewards, groups, "amin")[groups]
    mean = sum_by(above, groups, count) / size_by(groups, count).clamp(min=1)
    return above - mean[groups]


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    # r - (n m - r) / (n - 1) = (r - m) n / (n - 1)
    size = size_by(groups, _count(groups))[groups]
    return group_mean(rewards, groups) * size / (size - 1).clamp(min=1)


def batch_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    return group_mean(rewards, torch.zeros_like(groups))


def group_mean_global_std(rewards: Tensor, groups: Tensor) -> Tensor:
    return _over_std(group_mean(rewards, groups), torch.zeros_like(groups))


def group_mean_batch_std(rewards: Tensor, groups: Tensor) -> Tensor:
    variance = batch_mean(rewards, groups).square().sum() / max(1, rewards.numel() - 1)
    return group_mean(rewards, groups) / (variance.sqrt() + EPS)


ADVANTAGES: dict[
    AdvantageName, Callable[[Tensor, Tensor], Tensor]
] = {  # of samples; global_norm, group_mean_global_norm and gae are of tokens, see below
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_mean": batch_mean,
    "group_mean_global_std": group_mean_global_std,
    "group_mean_batch_std": group_mean_batch_std,
}


def has_signal(rewards: Tensor, groups: Tensor) -> Tensor:
    """[G] bool, G the highest group number + 1: whether the group's rewards differ at all (DAPO's dynamic sampling)."""
    return _extreme(rewards, groups, "amax") > _extreme(rewards, groups, "amin")


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, cu_lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages [T] and returns [T] of packed tokens; sequence i is tokens cu_lengths[i] to cu_lengths[i + 1].

    delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lam A_(t+1),  return_t = A_t + V_t,  0 past the end.

    The recurrence is solved by doubling: when A_t holds the terms t .. t+k-1 and decay_t the factor over that span,
    A_t + decay_t A_(t+k) holds the terms t .. t+2k-1. The factor over a span that crosses the end of a sequence is 0,
    so sequences never mix, and log2(longest sequence) passes over the packed tensor are enough.
    """
    lengths = cu_lengths.diff()
    assert int(cu_lengths[-1]) == rewards.numel(), "cu_lengths does not cover the tokens"
    last = cu_lengths[1:][lengths > 0] - 1

    next_values = torch.cat([values[1:], values.new_zeros(1)])[: values.numel()]
    next_values[last] = 0
    advantages = rewards + gamma * next_values - values
    decay = torch.full_like(advantages, gamma * lam)
    decay[last] = 0

    span, longest = 1, int(lengths.max()) if lengths.numel() else 0
    while span < longest:
        advantages = torch.cat([advantages[:-span] + decay[:-span] * advantages[span:], advantages[-span:]])
        decay = torch.cat([decay[:-span] * decay[span:], decay[-span:]])
        span *= 2
    return advantages, advantages + values


def returns(rewards: Tensor, penalty: Tensor, cu_lengths: Tensor) -> Tensor:
    """[T]: every token pays its penalty (a KL, or zeros), the last of a sequence earns its reward; a token's return is everything
    earned from it to the end. `rewards` is [N], `penalty` [T]."""
    to_pay, _ = gae(penalty, torch.zeros_like(penalty), cu_lengths, gamma=1.0, lam=1.0)
    return torch.repeat_interleave(rewards, cu_lengths.diff()) - to_pay


def global_norm(rewards: Tensor, penalty: Tensor, cu_lengths: Tensor) -> Tensor:
    """[T]: returns, normalised over all tokens."""
    return normalised(returns(rewards, penalty, cu_lengths))


def group_mean_global_norm(rewards: Tensor, groups: Tensor, penalty: Tensor, cu_lengths: Tensor) -> Tensor:
    """[T]: the same of rewards against their group's mean; the penalty is paid after it."""
    return global_norm(group_mean(rewards, groups), penalty, cu_lengths)


def normalised(values: Tensor) -> Tensor:
    """With mean 0 and standard deviation 1."""
    return group_std(values, torch.zeros_like(values, dtype=torch.int64))


def _over_std(centred: Tensor, groups: Tensor) -> Tensor:
    """`centred` has mean 0 in every group."""
    count = _count(groups)
    variance = sum_by(centred.square(), groups, count) / (size_by(groups, count) - 1).clamp(min=1)
    return centred / (variance.sqrt()[groups] + EPS)


def _count(groups: Tensor) -> int:
    return int(groups.max()) + 1 if groups.numel() else 0


def _extreme(rewards: Tensor, groups: Tensor, which: str) -> Tensor:
    """[G]: the lowest (amin) or highest (amax) reward of each group, 0 for a number no sample has."""
    return rewards.new_zeros(_count(groups)).scatter_reduce(0, groups, rewards, which, include_self=False)
