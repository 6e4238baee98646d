"""A model that only scores, behind what a guard repeats and lowers (updater.py, `AnyUpdater`): no gradient, no optimizer.

For ranks that hold the reference policy and do not train it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trimtab.base.spans import log
from trimtab.config.run import Recompute
from trimtab.model.memory import free
from trimtab.model.policy import AnyPolicy
from trimtab.model.sequence import tokens_here
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.objectives.objective import Objective
from trimtab.update.pass_clock import PassClock
from trimtab.update.shares import Share, cap, pack_samples
from trimtab.update.updater import Progress


class FrozenScorer:
    """Scores samples as an Updater does. What is of training alone is nothing here."""

    overlaps = balances = False
    checkpoint_activations: Recompute = True
    fused = False
    activations_offloaded = True
    optimizer_offloaded = True
    applying = False
    begun = state_bytes = trained = parameters = 0

    def __init__(
        self,
        policy: AnyPolicy,
        objective: Objective,
        device: torch.device,
        *,
        ranks: int,
        score_token_budget: int,
        logprob_chunk: int,
    ) -> None:
        self.policy, self.objective, self.device, self.ranks = policy, objective, device, ranks
        self.token_budget = self.score_token_budget = score_token_budget
        self.logprob_chunk, self.piece = logprob_chunk, 1
        self.progress = Progress()

    def score(self, samples: Sequence[Sample], policy: AnyPolicy, field: str) -> None:
        self.score_share(pack_samples(self.objective.together, samples, self.score_token_budget), policy, field)

    @torch.no_grad()
    def score_share(self, share: Share, policy: AnyPolicy, field: str) -> None:
        """Micro-batches that are packed already, as Updater.score_share does it."""
        self.progress = Progress()
        with policy.present():
            found = [
                (batch, self.objective.estimate(policy, batch, self.logprob_chunk))
                for batch in self._micro_batches(share)
            ]
        for batch, estimates in found:
            self.objective.write(estimates, batch, field)

    def _micro_batches(self, share: Share) -> Iterator[MicroBatch]:
        loads = [tokens_here(load, self.policy.sequence) for load in share.loads]
        for number, (samples, places, load) in enumerate(zip(share.batches, share.places, loads), 1):
            self.progress = Progress("forward", number, len(loads), load, max(loads))
            log.progress = (number - 1, len(loads), "micro-batches")
            place_of = {id(sample): place for sample, place in zip(samples, places)}
            yield MicroBatch.build(samples, self.device, place_of)

    def longest(self, samples: Sequence[Sample], policy: AnyPolicy | None = None) -> int:
        return tokens_here(cap(samples, 0), (policy or self.policy).sequence)

    def abandon(self) -> None:
        free(self.device)

    def lose_peers(self) -> None:
        """Nothing is begun with them outside a pass."""

    def take_clocks(self) -> list[PassClock]:
        return []

    def layer_input_bytes(self, tokens: int) -> int:
        """Nothing is kept for a backward pass."""
        return 0

    def alloc_retries(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))
