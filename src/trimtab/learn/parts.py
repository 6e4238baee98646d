"""From the values of several reward parts to one reward.

The reward of sample i is the sum over parts k of w_k z_ik, where z_ik is the part's value x_ik or, so that no part weighs
more because of its units or its spread, its z-score among the samples compared:

    none    z = x
    group   z = (x - m_g) / s_g     mean and standard deviation (n - 1) over the samples of the same prompt
    step    z = (x - m) / s         over all samples of the step

Normalising each part by itself, before the sum, is GDPO's idea (Liu et al. 2026, arXiv 2601.05242): rewards whose sums are
equal but whose parts differ stay apart. Its second normalisation, of the sum over the step, is `learn.advantage`.

A part that does not apply to a sample adds nothing there and is left out of m and s. Where all values compared are equal,
or there is only one, z is exactly 0; nothing is ever divided by a spread that is only rounding. A positive factor on a
part's values and a constant added to them leave its z-scores as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.config.schema import Normalize
from trimtab.learn.advantages import group_mean
from trimtab.learn.segments import size_by, sum_by

ROUNDING = 1e-9
"""A spread of less than this fraction of the largest value compared is taken for none. Rewards are float64."""


@dataclass(frozen=True)
class Part:
    """How one part goes into the sum."""

    name: str
    weight: float = 1.0
    normalize: Normalize = "none"


def combine(values_NP: Tensor, groups_N: Tensor, parts: Sequence[Part]) -> Tensor:
    """[N]: the weighted sum. `values_NP` holds NaN where a part does not apply."""
    total_N = values_NP.new_zeros(len(values_NP))
    for part, values_N in zip(parts, values_NP.unbind(1), strict=True):
        applies = ~values_N.isnan()
        found = values_N[applies]
        if part.normalize == "group":
            found = z_score(found, groups_N[applies])
        elif part.normalize == "step":
            found = z_score(found, torch.zeros_like(groups_N[applies]))
        total_N[applies] += part.weight * found
    return total_N


def z_score(values: Tensor, groups: Tensor) -> Tensor:
    """(x - mean) / std within each group; exactly 0 in groups of one and in groups whose values are all equal."""
    if not values.numel():
        return values
    count = int(groups.max()) + 1
    centred = group_mean(values, groups)
    std = (sum_by(centred.square(), groups, count) / (size_by(groups, count) - 1).clamp(min=1)).sqrt()
    largest = values.new_zeros(count).scatter_reduce(0, groups, values.abs(), "amax", include_self=False)
    spread = (std > ROUNDING * largest)[groups]
    return torch.where(spread, centred / torch.where(spread, std[groups], 1.0), 0.0)
