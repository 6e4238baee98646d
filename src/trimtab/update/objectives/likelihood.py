"""Learning worked answers: minus the log-prob of each learned token, times the token's share of the step."""

from __future__ import annotations

import torch

from trimtab.model.policy import Policy
from trimtab.update.batch import MicroBatch
from trimtab.update.objectives.tokens import OverTokens, token_stats
from trimtab.update.stats import UpdateStats


class Likelihood(OverTokens):
    """See objective.py."""

    def __init__(self) -> None:
        super().__init__(temperature=1.0)

    def loss(
        self, policy: Policy, batch: MicroBatch, stats: UpdateStats, *, chunk: int, kl_coef: float
    ) -> torch.Tensor:
        logp = token_stats(policy, batch, self.temperature, chunk, policy.gradients).logprobs
        weighted = batch.gather("weights") * -logp
        stats.tokens += logp.shape[0]
        stats.add(loss=weighted)
        return weighted.sum()
