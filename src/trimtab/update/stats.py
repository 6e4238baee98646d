"""What one optimizer step came to, in numbers, and what it ran with: plain data that a Trainer takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from trimtab.config.run import Recompute

Scored = Literal["policy", "reference", "critic"]
"""Models that say something of samples."""
Trained = Literal["policy", "critic"]
"""Models that learn."""

OF_EACH_RANK = ("routes_replayed", "routes_agreed")
"""Sums that each rank has of its own tokens, also where ranks share micro-batches."""


@dataclass(frozen=True)
class PassSettings:
    """What micro-batches run with now."""

    token_budget: int
    recompute: Recompute
    logprob_chunk: int
    offload_activations: bool


@dataclass(frozen=True)
class Applied:
    """How the second half of a step went."""

    grad_norm: float
    applied: bool
    """False where the gradient is not finite: nothing has changed then."""
    behind: float | None = None
    """Micro-batches that the device had left to do when the last was launched; near 0, it waits for the host."""


@dataclass
class UpdateStats:
    """Sums over the tokens of one optimizer step, and how it was cut into micro-batches."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0
    row_tokens: int = 0
    largest: int = 0
    """Most tokens of a micro-batch on a device."""
    microbatches: int = 0
    sizes: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    """Sizes of each micro-batch, as `plan.activations.MicroBatchSize` takes them."""
    token_budget: int = 0
    """The cap on what a device has of each."""
    row_ranks: int = 1
    """Ranks that share each micro-batch."""
    grad_norm: float = 0.0
    applied: bool = True
    behind: float | None = None
    """As in `Applied`."""
    imbalance: float | None = None
    """With several ranks: counted FLOPs of the rank that has the most over the mean of all."""
    loss_scale: float = 1.0
    """What the loss was multiplied by for float16."""
    without_gradient: int = 0
    """Samples of the step that no pass was made for, because each adds exactly 0 to the gradient."""
    kl_ref_of: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    """For each micro-batch the places of its samples among those of the step, and each one's KL to the reference, summed over its
    tokens. Stays on the device."""

    def add(self, **values_R: torch.Tensor) -> None:
        for name, values in values_R.items():
            total = values.detach().double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def mean(self, name: str) -> float:
        return float(self.sums[name]) / max(1, self.tokens)

    def on_host(self) -> UpdateStats:
        """The same with no tensor on a device."""
        self.sums = {name: total.cpu() for name, total in self.sums.items()}
        self.kl_ref_of = [(places, values.cpu()) for places, values in self.kl_ref_of]
        return self

    @classmethod
    def of_ranks(cls, found: Sequence[UpdateStats], imbalance: float, sharing: int = 1) -> UpdateStats:
        """What ranks found in their shares of a step, together. `sharing`: how many consecutive ranks found the same because they
        share micro-batches; each has sizes of its own."""
        whole = cls(token_budget=max(stats.token_budget for stats in found), imbalance=imbalance)
        whole.sizes = [size for stats in found for size in stats.sizes]
        whole.largest = max(stats.largest for stats in found)
        whole.loss_scale = min(stats.loss_scale for stats in found)
        apart = {name: [stats.sums[name] for stats in found if name in stats.sums] for name in OF_EACH_RANK}
        found = found[::sharing]
        whole.row_ranks = found[0].row_ranks
        for stats in found:
            for name, total in stats.sums.items():
                whole.sums[name] = whole.sums[name] + total if name in whole.sums else total
            whole.tokens += stats.tokens
            whole.row_tokens += stats.row_tokens
            whole.microbatches += stats.microbatches
            whole.kl_ref_of += stats.kl_ref_of
        whole.sums |= {name: torch.stack(parts).sum(0) for name, parts in apart.items() if parts}
        return whole

    def complete(self, outcome: Applied) -> UpdateStats:
        """These, with how the step was applied."""
        self.grad_norm, self.applied, self.behind = outcome.grad_norm, outcome.applied, outcome.behind
        return self
