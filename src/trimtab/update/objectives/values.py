"""A critic's loss: how far the value before each learned token is from what was earned from there on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.learn.values import value_loss
from trimtab.model.policy import AnyPolicy, Policy
from trimtab.update.batch import MicroBatch, Sample, parts_by_prompt
from trimtab.update.stats import UpdateStats


class Values:
    """See objective.py. `head` is the model's value head (critic.py); `clip`: most that a value moves in one update."""

    logits = False

    def __init__(self, head: torch.nn.Linear, clip: float | None) -> None:
        self.head, self.clip = head, clip

    def together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        return parts_by_prompt(samples, budget)

    def estimate(self, policy: AnyPolicy, batch: MicroBatch, chunk: int) -> torch.Tensor:
        run = batch.run(policy)
        values: torch.Tensor = self.head(run.hidden_RE.to(self.head.weight.dtype)).squeeze(-1)
        return run.whole(values)

    def write(self, estimates: torch.Tensor, batch: MicroBatch, field: str) -> None:
        batch.scatter(estimates, field)

    def loss(
        self, policy: Policy, batch: MicroBatch, stats: UpdateStats, *, chunk: int, kl_coef: float
    ) -> torch.Tensor:
        values = self.estimate(policy, batch, chunk)
        found = value_loss(values, batch.gather("values"), batch.gather("returns"), self.clip)
        weighted = batch.gather("weights") * found.loss
        stats.tokens += values.shape[0]
        stats.add(loss=weighted, clipped=found.clipped, values=values)
        return weighted.sum()
