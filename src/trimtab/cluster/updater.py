"""The updater of every rank, as one: what a guard repeats and lowers (update/updater.py, `AnyUpdater`).

The work of a step is dealt once, here; ranks add up their shares. A step is applied in two halves: every rank prepares, and only
when all have, all apply. Memory that runs out on one rank before that is raised here as if it had run out in this process, so the
guard lets all ranks abandon the step, lowers one setting for all of them, and repeats it with the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from trimtab.cluster.ranks import Ranks, ShortOnRank
from trimtab.config.run import Recompute
from trimtab.update.batch import Sample
from trimtab.update.shares import Cost, Share, Together, cap, deal_samples
from trimtab.update.stats import Applied, Scored, Trained, UpdateStats
from trimtab.update.updater import Progress


@dataclass(frozen=True)
class UpdaterFacts:
    """What an updater on a rank says of itself when it is built."""

    token_budget: int
    score_token_budget: int
    logprob_chunk: int
    checkpoint_activations: Recompute
    piece: int
    fused: bool
    activations_offloaded: bool
    optimizer_offloaded: bool
    state_bytes: int
    trained: int
    parameters: int
    layer_input_bytes: int
    """For one token."""
    device: torch.device
    balances: bool = False
    """As in `Updater`."""


class RankedUpdater:
    """One of the models that ranks train."""

    def __init__(
        self,
        ranks: Ranks,
        model: Trained,
        facts: Sequence[UpdaterFacts],
        together: Together,
        cost: Cost,
        equal: bool = False,
        equal_scores: bool = False,
        row_ranks: Mapping[Scored, int] = MappingProxyType({}),
    ) -> None:
        """`equal`: ranks have equally many micro-batches, for they have collectives in them; `equal_scores`: in passes without
        a gradient, too. `row_ranks`: how many consecutive ranks share each micro-batch, in passes of each model; by default 1."""
        self._row_ranks = row_ranks
        self._equal, self._equal_scores = equal, equal_scores
        self._ranks, self._model, self._together, self._cost = ranks, model, together, cost
        self._facts = facts[0]
        self._state_bytes = sum(each.state_bytes for each in facts)
        self._set = {
            name: getattr(facts[0], name) for name in ("token_budget", "score_token_budget", "logprob_chunk", "piece")
        }
        self.progress = Progress()
        self.begun = 0
        self.applying = False

    @property
    def ranks(self) -> int:
        return len(self._ranks)

    @property
    def device(self) -> torch.device:
        return self._facts.device

    def accumulate(self, samples: Sequence[Sample], kl_coef: float = 0.0) -> UpdateStats:
        sharing = self._sharing(self._model)
        shares = self._deal(samples, self.token_budget, sharing, self._equal)
        self.progress = Progress()
        if self._facts.balances:
            counting = [(self._model, share) for share in shares for _ in range(sharing)]
            choices = torch.stack(self._ask("count_choices", counting)).sum(0)
            shares = [replace(share, choices=choices) for share in shares]
        asked = [(self._model, share, kl_coef) for share in shares for _ in range(sharing)]
        found = self._ask("accumulate", asked)
        most = max((share.flops for share in shares), default=0.0)
        mean = sum(share.flops for share in shares) / len(shares)
        largest = max((-(-load // sharing) for share in shares for load in share.loads), default=0)
        self.progress = Progress("backward", microbatches=sum(len(s.batches) for s in shares), largest=largest)
        return UpdateStats.of_ranks(found, most / mean if mean else 1.0, sharing)

    def apply(self, lr: float) -> Applied:
        self.progress.part = "optimizer step"
        self._ask("prepare", [(self._model,)] * len(self._ranks))
        self.applying = True
        self.begun += 1
        found: list[Applied] = self._ranks.ask("apply", self._model, lr)
        self.applying = False
        assert len({(one.grad_norm, one.applied) for one in found}) == 1 or not found[0].applied, "ranks disagree"
        behind = [one.behind for one in found if one.behind is not None]
        return replace(found[0], behind=min(behind) if behind else None)

    def score(self, samples: Sequence[Sample], by: Scored, field: str) -> None:
        sharing = self._sharing(by)
        shares = self._deal(samples, self.score_token_budget, sharing, self._equal_scores)
        self.progress = Progress()
        asked = [(self._model, by, share, field) for share in shares for _ in range(sharing)]
        for found in self._ask("score", asked)[::sharing]:
            for place, value in found:
                setattr(samples[place], field, value)

    def _sharing(self, model: Scored) -> int:
        """Ranks that share each micro-batch in passes of a model."""
        return self._row_ranks.get(model, 1)

    def _deal(self, samples: Sequence[Sample], budget: int, sharing: int, equal: bool) -> list[Share]:
        """The work of each set of ranks that share micro-batches. `budget`: tokens on a device."""
        sets = len(self._ranks) // sharing
        return deal_samples(self._together, samples, budget * sharing, sets, self._cost, equal)

    def longest(self, samples: Sequence[Sample], policy: Any = None) -> int:
        return -(-cap(samples, 0) // self._sharing(policy or self._model))

    def abandon(self) -> None:
        self._ranks.ask("abandon", self._model)

    @property
    def checkpoint_activations(self) -> Recompute:
        return self._facts.checkpoint_activations

    def recompute(self, activations: Recompute) -> None:
        self._ranks.ask("recompute", self._model, activations)
        self._facts = replace(self._facts, checkpoint_activations=activations)

    @property
    def fused(self) -> bool:
        return self._facts.fused

    @property
    def activations_offloaded(self) -> bool:
        return self._facts.activations_offloaded

    def offload_activations(self) -> None:
        self._ranks.ask("offload_activations", self._model)
        self._facts = replace(self._facts, activations_offloaded=True)

    def layer_input_bytes(self, tokens: int) -> int:
        return self._facts.layer_input_bytes * tokens * len(self._ranks)

    @property
    def optimizer_offloaded(self) -> bool:
        return self._facts.optimizer_offloaded

    def offload_optimizer(self) -> None:
        self._ranks.ask("offload_optimizer", self._model)
        self._facts = replace(self._facts, optimizer_offloaded=True)

    @property
    def state_bytes(self) -> int:
        return self._state_bytes

    @property
    def trained(self) -> int:
        return self._facts.trained

    @property
    def parameters(self) -> int:
        return self._facts.parameters

    def alloc_retries(self) -> int | None:
        found = [count for count in self._ranks.ask("alloc_retries", self._model) if count is not None]
        return sum(found) if found else None

    def _setting(self, name: str) -> int:
        value: int = self._set[name]
        return value

    def _change(self, name: str, value: int) -> None:
        if value != self._set[name]:
            self._ranks.ask("set", self._model, name, value)
            self._set[name] = value

    token_budget = property(lambda self: self._setting("token_budget"), lambda self, v: self._change("token_budget", v))
    score_token_budget = property(
        lambda self: self._setting("score_token_budget"), lambda self, v: self._change("score_token_budget", v)
    )
    logprob_chunk = property(
        lambda self: self._setting("logprob_chunk"), lambda self, v: self._change("logprob_chunk", v)
    )
    piece = property(lambda self: self._setting("piece"), lambda self, v: self._change("piece", v))

    def _ask(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """An order that may run short of memory; where the rank was is then this updater's progress."""
        try:
            return self._ranks.ask_each(method, args)
        except ShortOnRank as short:
            if isinstance(short.facts, Progress):
                self.progress = short.facts
            raise
