"""What the Updater asks of an objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from trimtab.model.policy import AnyPolicy, Policy
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.stats import UpdateStats


class Objective(Protocol):
    """What is minimised."""

    logits: bool
    """Log-probs are computed, from the logits of some tokens at a time (`chunk`)."""

    def together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        """Samples that are in one micro-batch, whatever else is."""
        ...

    def estimate(self, policy: AnyPolicy, batch: MicroBatch, chunk: int) -> torch.Tensor:
        """What `policy` says of the micro-batch's samples, without a gradient: log-probs, values or scores."""
        ...

    def write(self, estimates: torch.Tensor, batch: MicroBatch, field: str) -> None:
        """Put estimates into a field of the samples they are of, on the CPU."""
        ...

    def loss(
        self, policy: Policy, batch: MicroBatch, stats: UpdateStats, *, chunk: int, kl_coef: float
    ) -> torch.Tensor:
        """The micro-batch's part of the step's loss; what is worth knowing of it is added to `stats`. `chunk`: tokens whose
        logits exist at a time. `kl_coef`: weight of the distance to the reference, where the loss has one."""
        ...
