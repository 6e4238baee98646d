"""The native engine where ranks hold the trained weights in parts (`run.shard: full`): it has a whole copy of its own.

`publish` gathers the weights, one parameter at a time, into the copy, which lies at fixed addresses in an arena: graphs stay
valid. With adapters the rest is gathered once. While memory is lent to the update, the copy's is, too; the next `publish` takes
it back and fills all of it. A publish is a collective: all ranks do it, whether they generate or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trimtab.base.errors import EngineError
from trimtab.model.policy import Policy
from trimtab.model.replica import empty_copy, fill
from trimtab.model.sharded import ShardedPolicy
from trimtab.rollout.engine import Request
from trimtab.rollout.feed import Feed
from trimtab.rollout.native.arena import Arena, piece_bytes
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.trajectory import Group


class ReplicaEngine(NativeEngine):
    """See engine.py. `policy` is the trained one; the engine's own is made from it."""

    def __init__(self, policy: Policy, tokenizer: Any, stop_token_ids: Sequence[int], **settings: Any) -> None:
        self._source: Policy | None = policy
        own = self._make_own(policy)
        sizes = [piece_bytes((unit.size,), unit.dtype) for unit in own.weights.units]
        self._weights = Arena(sum(sizes), own.device)
        for unit in own.weights.units:
            own.weights.put(unit, self._weights.tensor((unit.size,), unit.dtype))
        own.routers.kept = policy.routers.kept
        self._own = own
        self._gather_weights(frozen=True)
        super().__init__(own, tokenizer, stop_token_ids, **settings)

    def _make_own(self, policy: Policy) -> Policy:
        """A policy of the engine's own, its weights undefined."""
        assert isinstance(policy, ShardedPolicy)
        return Policy(empty_copy(policy.skeleton, policy.device), check=False)

    @property
    def non_torch_bytes(self) -> int:
        lendable = self._weights.lendable and self._weights.mapped
        return super().non_torch_bytes + (self._weights.nbytes if lendable else 0)

    def publish(self, version: int) -> None:
        lent = not self._weights.mapped
        self._weights.reclaim()
        self._gather_weights(frozen=lent)
        super().publish(version)

    def lend(self) -> None:
        super().lend()
        if self._lent:
            self._weights.lend()

    def generate(self, requests: Sequence[Request], feed: Feed | None = None) -> Iterator[Group]:
        if not self._weights.mapped:
            raise EngineError("the engine has lent its copy of the weights, and none was published since")
        return super().generate(requests, feed)

    def close(self) -> None:
        super().close()
        self._weights.close()

    def _gather_weights(self, frozen: bool) -> None:
        assert self._source is not None
        fill(self._own.model, self._source.model, self._source.weights, frozen)
