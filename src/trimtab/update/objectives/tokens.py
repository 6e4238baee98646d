"""What objectives over tokens share: log-probs of the learned tokens, in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.model.gradients import Gradients
from trimtab.model.head import TokenStats
from trimtab.model.policy import AnyPolicy
from trimtab.update.batch import MicroBatch, Sample, parts_by_prompt


def token_stats(
    policy: AnyPolicy, batch: MicroBatch, temperature: float, chunk: int, gradients: Gradients | None = None
) -> TokenStats:
    """Log-prob of each learned token and the entropy there. `gradients`: where the gradient of the head's weights is added."""
    run = batch.run(policy)
    found = policy.head.token_stats(run.hidden_RE, run.targets_R, temperature, chunk, gradients)
    return TokenStats(run.whole(found.logprobs), run.whole(found.entropy))


class OverTokens:
    """Estimates are log-probs of the learned tokens at one temperature; samples of a prompt share a micro-batch."""

    logits = True

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        return parts_by_prompt(samples, budget)

    def estimate(self, policy: AnyPolicy, batch: MicroBatch, chunk: int) -> torch.Tensor:
        return token_stats(policy, batch, self.temperature, chunk).logprobs

    def write(self, estimates: torch.Tensor, batch: MicroBatch, field: str) -> None:
        batch.scatter(estimates, field)
