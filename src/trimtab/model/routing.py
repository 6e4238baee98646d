"""The routers of a mixture: which experts they choose, counted over a step, balanced, recorded and replayed.

A router of transformers gives logits, the weights of the chosen experts, and which these are. Nothing here changes that but what
a pass is asked for (`Routers.during`):
  count    how many tokens each expert is chosen by, in every layer
  balance  the gradient of a balancing loss over shares that were counted for the whole step before: for a token it is linear in
           the token's own probabilities, so that micro-batches add up to the step, however it is cut
  replay   experts that were chosen before, by the engine: their weights are computed anew from the logits
  record   the choice, given to whoever asked

Layers that are computed again in the backward pass see the same.

Shapes: T tokens, K experts of each token, G experts, L layers with routers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trimtab.base.errors import ModelError
from trimtab.model.experts import expert_modules

FREE = -1
"""In a replay: the router chooses itself."""


@dataclass(frozen=True)
class Balance:
    """A step's balancing loss: coefficient G / L, times for each layer the sum over experts of the share of choices that fell
    on the expert and of the mean probability that it got. It is the coefficient where all experts are used alike."""

    shares_LG: torch.Tensor
    scale: float
    """Of one token's part: coefficient G / (L tokens of the step)."""
    weights_T: torch.Tensor
    """How often each token of the row counts: once for each learned token that is predicted there."""

    @classmethod
    def of(cls, counts_LG: torch.Tensor, coefficient: float, used: int, weights_T: torch.Tensor) -> Balance:
        layers, experts = counts_LG.shape
        choices = counts_LG.sum(1, keepdim=True)
        tokens = float(choices[0]) / used
        device = weights_T.device
        return cls((counts_LG / choices).to(device), coefficient * experts / (layers * max(1.0, tokens)), weights_T)


@dataclass
class Asked:
    """What a pass is asked for."""

    counts: torch.Tensor | None = None
    """[L, G], added to; with `weights`."""
    weights_T: torch.Tensor | None = None
    balance: Balance | None = None
    replay_TLK: torch.Tensor | None = None
    """FREE where there is nothing to replay."""
    record: Callable[[int, torch.Tensor], None] | None = None
    agreed: list[torch.Tensor] = field(default_factory=list)
    """With a replay: by layer and pass, how many choices are replayed, and how many of them are the router's own."""


class Routers:
    """The routers of a model, first layer first."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = routers_of(model)
        self.asked = Asked()
        self.kept = False
        """An engine keeps what they choose for the trainer (`learn.router_replay`)."""
        self._rules: list[_Rule | None] = [None] * len(self.modules)
        for layer, module in enumerate(self.modules):
            module.register_forward_hook(lambda router, _, out, layer=layer: self._after(layer, router, out))

    def __bool__(self) -> bool:
        return bool(self.modules)

    @property
    def experts(self) -> int:
        return int(self.modules[0].weight.shape[0])

    @property
    def used(self) -> int:
        return int(self.modules[0].top_k)

    @property
    def routes(self) -> tuple[int, int] | None:
        """Routers, and experts of each token, where what they choose is kept."""
        return (len(self.modules), self.used) if self.kept and self.modules else None

    @contextmanager
    def during(self, asked: Asked) -> Iterator[Asked]:
        """Passes, forward and backward, that are asked for this."""
        before, self.asked = self.asked, asked
        try:
            yield asked
        finally:
            self.asked = before

    def no_counts(self, device: torch.device) -> torch.Tensor:
        return torch.zeros((len(self.modules), self.experts), dtype=torch.float64, device=device)

    def _after(self, layer: int, router: Any, out: Any) -> Any:
        asked = self.asked
        logits, weights, index = out
        if asked.replay_TLK is not None:
            weights, index = self._replayed(layer, logits, weights, index, asked)
        if asked.record is not None:
            asked.record(layer, index)
        if asked.counts is not None:
            assert asked.weights_T is not None
            each = asked.weights_T[:, None].expand_as(index).to(asked.counts.dtype)
            asked.counts[layer].scatter_add_(0, index.flatten(), each.flatten())
        if asked.balance is not None and torch.is_grad_enabled() and logits.requires_grad:
            balance = asked.balance
            chances = _chances(router, logits)
            parts_T = (chances * balance.shares_LG[layer].to(chances.dtype)).sum(-1) * balance.weights_T.to(
                chances.dtype
            )
            weights = _With.apply(weights, parts_T.sum() * balance.scale)
        return logits, weights, index

    def _replayed(
        self, layer: int, logits: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, asked: Asked
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert asked.replay_TLK is not None
        chosen = asked.replay_TLK[:, layer].to(index.dtype)
        known = chosen[:, :1] >= 0
        if self._rules[layer] is None:
            self._rules[layer] = _rule_of(self.modules[layer], logits.detach(), weights.detach(), index)
        rule = self._rules[layer]
        assert rule is not None
        same = (chosen[:, :, None] == index[:, None, :]).any(-1) & known
        asked.agreed.append(torch.stack((known.expand_as(index).sum(), same.sum())).detach())
        index = torch.where(known, chosen, index)
        anew = rule.weights(logits, index).to(weights.dtype)
        return torch.where(known, anew, weights), index


def routers_of(model: nn.Module) -> list[Any]:
    """The router beside each module of experts."""
    experts = {id(module) for module in expert_modules(model)}
    found = []
    for module in model.modules():
        inner: Any = getattr(module, "experts", None)
        while inner is not None and id(inner) not in experts and hasattr(inner, "base_layer"):
            inner = inner.base_layer
        router = getattr(module, "gate", None) or getattr(module, "router", None)
        if inner is not None and id(inner) in experts and isinstance(router, nn.Module) and hasattr(router, "top_k"):
            found.append(router)
    return found


def _chances(router: Any, logits: torch.Tensor) -> torch.Tensor:
    """Each expert's probability: a softmax, or, where experts are scored one by one, their scores over the sum of these."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if hasattr(router, "e_score_correction_bias"):
        scores = wide.sigmoid()
        return scores / scores.sum(-1, keepdim=True)
    return wide.softmax(-1)


class _With(torch.autograd.Function):
    """The first argument, and a term of the loss beside it."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        ctx.dtype = term.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)


@dataclass(frozen=True)
class _Rule:
    """How a router weighs the experts that were chosen."""

    kind: str
    normalised: bool
    scale: float

    def weights(self, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.kind == "chosen":
            return wide.gather(1, index).softmax(-1) * self.scale
        scores = wide.softmax(-1) if self.kind == "softmax" else wide.sigmoid()
        chosen = scores.gather(1, index)
        if self.normalised:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen * self.scale


def _rule_of(router: Any, logits: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> _Rule:
    """The rule that gives the weights that the router gave, seen by trying."""
    scale = float(getattr(router, "routed_scaling_factor", 1.0) or 1.0)
    tries = [
        _Rule(kind, normalised, factor)
        for kind, normalised in (
            ("softmax", False),
            ("softmax", True),
            ("chosen", False),
            ("sigmoid", False),
            ("sigmoid", True),
        )
        for factor in dict.fromkeys((1.0, scale))
    ]
    gaps = [float((rule.weights(logits, index) - weights).abs().max()) for rule in tries]
    best = min(range(len(tries)), key=gaps.__getitem__)
    if not gaps[best] <= 0.02 * float(weights.abs().max()):
        raise ModelError(
            f"{type(router).__name__} weighs its experts in a way that Trimtab does not know, so what the engine chose cannot be "
            "replayed. Write learn.router_replay: false."
        )
    return tries[best]
