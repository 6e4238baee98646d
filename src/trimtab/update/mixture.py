"""What an update asks of the routers of a mixture: counts of a step, the balancing loss over them, and what the engine chose.

Guarantee: nothing here depends on how a step is cut. Choices are counted for the whole step before its first backward pass, once
for each learned token, where it is predicted; the loss is then a sum over learned tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trimtab.model.policy import AnyPolicy, Policy
from trimtab.model.routing import FREE, Asked, Balance
from trimtab.model.transfer import to_device
from trimtab.update.batch import MicroBatch
from trimtab.update.shares import Share
from trimtab.update.stats import UpdateStats


class MixtureLoss:
    """`coefficient`: weight of the balancing loss. Without `follows`, neither that nor what the engine chose is of this model."""

    def __init__(self, policy: Policy, coefficient: float, follows: bool = True) -> None:
        self._policy, self._routers, self._follows = policy, policy.routers, follows
        self._coefficient = coefficient if follows else 0.0

    @property
    def balances(self) -> bool:
        return bool(self._coefficient and self._routers)

    @torch.no_grad()
    def count(self, batches: Iterable[tuple[MicroBatch, bool]]) -> torch.Tensor:
        """[L, G] on the host; a filler counts for nothing."""
        counts = self._routers.no_counts(self._policy.device)
        for batch, filler in batches:
            asked = Asked(counts=counts, weights_T=self._weights(batch, filler), replay_TLK=self._replay(batch))
            with self._routers.during(asked):
                batch.run(self._policy)
        return counts.cpu()

    def of(self, batch: MicroBatch, share: Share, filler: bool, loss_scale: float = 1.0) -> Asked:
        """What the passes of a micro-batch are asked for. `loss_scale`: what its loss is multiplied by."""
        if not self._routers:
            return Asked()
        balance = None
        if self.balances:
            assert share.choices is not None, "choices are counted before anything is accumulated"
            coefficient = self._coefficient * loss_scale
            balance = Balance.of(share.choices, coefficient, self._routers.used, self._weights(batch, filler))
        return Asked(balance=balance, replay_TLK=self._replay(batch))

    def scored(self, batch: MicroBatch, policy: AnyPolicy) -> Asked:
        """The same for a pass without a gradient; another model than the policy chooses itself."""
        return Asked(replay_TLK=self._replay(batch)) if self._routers and policy is self._policy else Asked()

    def _weights(self, batch: MicroBatch, filler: bool) -> torch.Tensor:
        """How many learned tokens each token predicts: several samples may begin after one prompt."""
        weights = torch.zeros(batch.tokens_T.shape[0], dtype=torch.float64, device=batch.tokens_T.device)
        if not filler:
            weights.index_add_(0, batch.predictors_R, torch.ones_like(batch.predictors_R, dtype=torch.float64))
        return batch.here(self._policy, weights, 0.0)

    def _replay(self, batch: MicroBatch) -> torch.Tensor | None:
        routes = batch.routes() if self._follows else None
        return None if routes is None else to_device(batch.here(self._policy, routes, FREE), batch.tokens_T.device)


def note_agreement(asked: Asked, stats: UpdateStats) -> None:
    """How many choices were replayed, and how many of them the router would have made itself."""
    if asked.agreed:
        known, same = torch.stack(asked.agreed).sum(0)
        stats.add(routes_replayed=known, routes_agreed=same)
