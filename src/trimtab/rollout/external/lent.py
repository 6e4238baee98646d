"""A rank whose device another rank's engine uses, too (rollout/seat.py): it generates nothing itself.

Where ranks hold the weights in parts it takes part in what gathers them: at the start, in each publish, and in the passes that
the engines are compared with.
"""

from __future__ import annotations

from trimtab.model.adapters import has_adapters
from trimtab.model.memory import free
from trimtab.model.policy import Policy
from trimtab.model.sharded import ShardedPolicy
from trimtab.rollout.external.agreement import pass_with_the_others
from trimtab.rollout.external.gathered import GatheredWeights
from trimtab.rollout.no_rollout import NoRollout


class LentDevice(NoRollout):
    """See rollout/engine.py."""

    description = "another rank's engine"

    def __init__(self, policy: Policy, longest: int) -> None:
        super().__init__()
        free(policy.device)  # the engine needs room here
        self._weights: GatheredWeights | None = None
        self._adapted = has_adapters(policy.model)
        if isinstance(policy, ShardedPolicy):
            self._weights = GatheredWeights(policy)
            self._weights.publish()
            pass_with_the_others(policy, min(policy.context_tokens, longest))

    def publish(self, version: int) -> None:
        if self._weights is not None and not self._adapted:
            self._weights.publish()

    def close(self) -> None:
        if self._weights is not None:
            self._weights.close()
