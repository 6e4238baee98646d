"""The exactness rule: what one token weighs in the loss of a step, known before the step is split.

loss = sum over all tokens t of the step of weight(sequence of t) * loss_t, with N sequences of lengths L_i:

    token_mean      1 / sum_j L_j               every token weighs the same: DAPO, Yu et al. 2025, arXiv 2503.14476
    sequence_mean   1 / (N L_i)                 every sequence weighs the same: GRPO, Shao et al. 2024, arXiv 2402.03300
    sequence_sum    1 / N                       a sequence is one action, its log-prob a sum: RLOO, Ahmadian et al. 2024
    constant        1 / (N max_new_tokens)      no division by anything that was sampled: Dr. GRPO, Liu et al. 2025

The loss is then a plain sum, so micro-batches, devices and replays add up to the same gradient however the step is cut.
Count over everything one optimizer step consumes, on all devices; never over a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.config.learn import AggregateName


def token_weights(lengths: Tensor, mode: AggregateName, max_new_tokens: int, include: Tensor | None = None) -> Tensor:
    """[N] float32: the weight of each token of sequence i. `lengths` is [N] int, `include` [N] bool.

    A sequence that is not included weighs 0 and counts in no denominator, as if the step did not have it.
    """
    if include is None:
        include = torch.ones_like(lengths, dtype=torch.bool)
    sequences = include.sum()
    if mode == "token_mean":
        denominator = (lengths * include).sum().expand_as(lengths)
    elif mode == "sequence_mean":
        denominator = sequences * lengths
    elif mode == "sequence_sum":
        denominator = sequences.expand_as(lengths)
    elif mode == "constant":
        denominator = (sequences * max_new_tokens).expand_as(lengths)
    else:
        raise AssertionError(f"unknown aggregate {mode!r}")
    return torch.where(include & (denominator > 0), 1.0 / denominator.clamp(min=1).float(), 0.0)
