"""The native engine cut over several devices (`run.rollout.tensor_parallel`): each rank has a slice of every layer and of the KV
cache, and all run one schedule.

`publish` fills a rank's slices from the trainer's weights, one parameter after the other, whatever `run.shard` is
(model/slices.py). After the attention's output and the feed-forward layers ranks add up their terms; the logits of all words are
gathered, so every rank draws the same token from the same counter. What a rank decides by itself it decides like the others,
because it knows the same: requests come to the first rank, which passes on what it hears each round, and shortages of memory are
voted on (together.py).

At the start the log-probs of the slices are compared with those of the whole model, on its real weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.base.errors import EngineError, MemoryExhausted
from trimtab.model.attention import AttentionPlan
from trimtab.model.head import Head
from trimtab.model.memory import Arguments, Result, Shortage, free
from trimtab.model.policy import TOLERANCE_NATS, Policy, distance
from trimtab.model.replica import fill, skeleton_of
from trimtab.model.sharded import ShardedPolicy
from trimtab.model.slices import CutModel, cut_model
from trimtab.rollout.engine import Request
from trimtab.rollout.feed import Bounds, CutRequest, Feed, Load, News
from trimtab.rollout.native.replica import ReplicaEngine
from trimtab.rollout.native.together import FIRST, Together
from trimtab.rollout.trajectory import Group

NOTHING_NEW = News()


@dataclass(frozen=True)
class CutHead(Head):
    """See head.py: this rank's words, and all of them in `logits`."""

    together: Together | None = None
    vocabulary: int = 0

    def logits(self, hidden_TE: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        own = super().logits(hidden_TE, temperature)
        return self.gathered(own)

    @property
    def words(self) -> int:
        return self.vocabulary

    def gathered(self, own_TV: torch.Tensor, vote: bool = True) -> torch.Tensor:
        """The logits of all words from those of this rank's. `vote`: see together.py."""
        assert self.together is not None
        each = -(-self.vocabulary // self.together.parts)
        if own_TV.shape[-1] < each:
            own_TV = torch.nn.functional.pad(own_TV, (0, each - own_TV.shape[-1]))
        return self.together.gather(own_TV, vote)[..., : self.vocabulary]


class CutPolicy(Policy):
    """A rank's slices as a policy, of which all ranks make a pass at the same time."""

    def __init__(self, cut: CutModel, together: Together) -> None:
        self._cut, self._together = cut, together
        for module in cut.sums:
            module.register_forward_hook(lambda module, args, output: together.sum(output))
        together.sums_of_a_pass = len(cut.sums)
        super().__init__(cut.model, check=False)

    @property
    def together(self) -> Together:
        return self._together

    def look_at_head(self) -> None:
        """The weights have been put elsewhere, and the head's may be a part of another's."""
        self.head = self._head()

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        with self._together.whole_pass(tokens_T.shape[0], self.config.hidden_size, self.dtype):
            return super().hidden(tokens_T, positions_T, plan)

    def _head(self) -> CutHead:
        plain, cut = super()._head(), self._cut
        weight, bias = plain.weight_VE, plain.bias_V
        if weight.shape[0] == cut.vocabulary:  # the embedding, which is whole
            weight = weight[slice(*cut.words)]
            bias = None if bias is None else bias[slice(*cut.words)]
        return CutHead(weight, bias, plain.scale, plain.softcap, self._together, cut.vocabulary)


class CutEngine(ReplicaEngine):
    """See engine.py. The same calls on every rank, `generate` excepted: with a feed it is the first one's, and the others
    `follow`."""

    def __init__(
        self, policy: Policy, tokenizer: Any, stop_token_ids: Sequence[int], *, together: Together, **settings: Any
    ) -> None:
        """`policy`: the whole model, here or on the host."""
        self._together = together
        if together.rank != FIRST:  # all lower the same: one says so
            settings["on_recovery"] = lambda line: None
        super().__init__(policy, tokenizer, stop_token_ids, joined=together, **settings)
        self._compare(policy)

    @property
    def description(self) -> str:
        return f"{super().description}, cut over {self._together.parts} devices"

    @property
    def waits(self) -> int:
        return self._together.waits

    def generate(self, requests: Sequence[Request], feed: Feed | None = None) -> Iterator[Group]:
        return super().generate(requests, None if feed is None else _Passing(feed, self._together))

    def follow(self, requests: Sequence[Request], bounds: Bounds) -> None:
        """Take part in what the first rank generates."""
        assert self._together.rank != FIRST
        for _ in super().generate(requests, _Listening(bounds, self._together)):
            pass

    def let_go(self) -> dict[str, torch.Tensor]:
        """The policy that the slices are of is trained elsewhere: it is given up here, and new weights are `take`n. Returns what
        comes, in order, as tensors without values."""
        assert self._source is not None
        trained = {name: p for name, p in self._source.model.named_parameters() if p.requires_grad}
        self._source = None
        return {name: torch.empty_like(p.data, device="meta") for name, p in trained.items()}

    @torch.no_grad()
    def take(self, name: str, whole: torch.Tensor) -> None:
        """Have this rank's slice of a parameter from now on; `publish` follows when all are taken."""
        own = self._own.weights.parameters[name]
        if name in self._cut.slices:
            self._cut.slices[name].fill(own.data, whole)
        else:
            own.copy_(whole)

    def _make_own(self, policy: Policy) -> Policy:
        skeleton = policy.skeleton if isinstance(policy, ShardedPolicy) else skeleton_of(policy.model)
        self._cut = cut_model(skeleton, self._together.rank, self._together.parts, self._together.device)
        self._policy_of_slices = CutPolicy(self._cut, self._together)
        return self._policy_of_slices

    def _gather_weights(self, frozen: bool) -> None:
        if self._source is None:
            return
        self._policy_of_slices.look_at_head()
        fill(self._own.model, self._source.model, self._source.weights, frozen, self._cut.slices)

    def _reclaim(self) -> None:
        outcome = self._attempt(self._decoder.reclaim)
        if isinstance(outcome, Shortage):
            free(self.policy.device)
            outcome = self._attempt(self._decoder.reclaim)
        if isinstance(outcome, Shortage):
            raise MemoryExhausted(f"the rollout cannot take its memory back: {outcome.message}")

    def _attempt(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result | Shortage:
        return self._together.attempt(work, *args)

    @torch.no_grad()
    def _compare(self, policy: Policy) -> None:
        """Refuse an architecture whose slices compute something else than the whole."""
        expected = policy.probe()
        gap = distance(self._own.probe().to(expected), expected)
        if not gap <= TOLERANCE_NATS[self._own.dtype]:
            raise EngineError(
                f"run.rollout.tensor_parallel: {policy.name} computes different log-probs when it is cut over "
                f"{self._together.parts} devices (off by {gap:.3g} nats). Write run.rollout.tensor_parallel: 1"
            )


class _Passing:
    """The first rank's feed (rollout/feed.py): the others hear what it is told."""

    def __init__(self, feed: Feed, together: Together) -> None:
        self._feed, self._together, self.bounds = feed, together, feed.bounds

    def exchange(self, load: Load) -> News:
        news = self._feed.exchange(load)
        self._together.tell(None if news == NOTHING_NEW else news)
        return news

    def returned(self, cuts: Sequence[CutRequest], load: Load) -> None:
        self._feed.returned(cuts, load)


class _Listening:
    """The feed of the others."""

    def __init__(self, bounds: Bounds, together: Together) -> None:
        self._together, self.bounds = together, bounds

    def exchange(self, load: Load) -> News:
        news = self._together.hear()
        return NOTHING_NEW if news is None else news

    def returned(self, cuts: Sequence[CutRequest], load: Load) -> None:
        """The first rank says it."""
