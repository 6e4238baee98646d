"""Fused layers on weights that ranks hold in parts (`run.shard: full`; sharded.py, fused.py).

Each layer runs as a method of its module that FSDP2 knows: its weights are gathered before and given up after, and gathered again
before its backward pass. Gradients of matrices are handed over in float32 (handed.py), so they are neither rounded nor averaged
before ranks add them up; vectors and adapters are whole on every rank, as are the norms that a layer shares with the next one.

Guarantee: FSDP2 has one tensor for each gathered parameter, which is filled and emptied, so what was read of a layer once holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import register_fsdp_forward_method

from trimtab.model.attention import AttentionPlan
from trimtab.model.fused import FirstNorm
from trimtab.model.handed import HandedGradients
from trimtab.model.layer import LayerCall, run_layer
from trimtab.model.norms import Norm, Rotary
from trimtab.model.packed import PackedPlan
from trimtab.model.parts import (
    GatheredLinears,
    LayerParts,
    Unfusable,
    Watch,
    kinds_and_factor,
    read_layer,
    read_norm,
    rotary_tables,
)
from trimtab.model.policy import PROBE_LENGTHS
from trimtab.model.shapes import layer_shapes
from trimtab.model.sharded import ShardedPolicy

LAYER, EMBEDDING = "trimtab_fused_layer", "trimtab_embedding"
"""Methods that are added to modules, for FSDP2 to gather their weights."""


@dataclass(frozen=True)
class _Row:
    """What layers are told of the row that they run."""

    positions: torch.Tensor
    plan: AttentionPlan
    rotaries: dict[str, Rotary]


class FusedSharded:
    """See `FusedForward`."""

    def __init__(self, policy: ShardedPolicy) -> None:
        self.policy = policy
        self._shapes = layer_shapes(policy)
        self._kinds, self._factor = kinds_and_factor(policy, self._shapes)
        self._watch = Watch(policy.model)
        self._rotaries: dict[str, Rotary] = {}
        self._known: dict[tuple[object, ...], LayerParts] = {}
        self._row: _Row | None = None
        self._layers, self._embedding = list(policy.body.layers), policy.body.embed_tokens
        if not all(hasattr(x, "input_layernorm") and hasattr(x, "post_attention_layernorm") for x in self._layers):
            raise Unfusable("its layers do not begin with norms")
        self._norms: list[Norm] = [
            *(read_norm(layer.input_layernorm) for layer in self._layers),
            read_norm(policy.body.norm),
        ]
        for index, layer in enumerate(self._layers):
            setattr(layer, LAYER, _Gathered(self, index).run)
            register_fsdp_forward_method(layer, LAYER)
        setattr(self._embedding, EMBEDDING, self._embed)
        register_fsdp_forward_method(self._embedding, EMBEDDING)  # nothing happens where it is the root's

    def forget(self) -> None:
        self._known = {}

    def __call__(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, longest: int, plan: AttentionPlan
    ) -> torch.Tensor:
        """[T, E]; called while the root's own weights are gathered."""
        self._rotaries = rotary_tables(self.policy, self._kinds, longest, self._rotaries)
        self._row = _Row(positions_T, plan, self._rotaries)
        x_TE = getattr(self._embedding, EMBEDDING)(tokens_T)
        residual_TE, x_TE = FirstNorm.apply(x_TE, self._norms[0].weight, self._norms[0])
        for layer in self._layers:
            residual_TE, x_TE = getattr(layer, LAYER)(residual_TE, x_TE)
        self._row = None
        hidden: torch.Tensor = x_TE
        return hidden

    def _embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        found = F.embedding(tokens_T, self._embedding.weight, self._embedding.padding_idx)
        return found if self._factor == 1.0 else found * self._factor

    def run(self, index: int, residual_TE: torch.Tensor, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer, while its weights are gathered."""
        policy, row = self.policy, self._row
        assert row is not None
        parts = self._parts(index)
        call = LayerCall(
            index, parts, self._norms[index], self._norms[index + 1], row.rotaries[parts.kind], row.positions, row.plan,
            policy.keep, policy.activation_offload, policy.gradients,
        )  # fmt: skip
        return run_layer(residual_TE, x_TE, call)

    def _parts(self, index: int) -> LayerParts:
        key = (index, self._watch.adapters())
        if key not in self._known:
            store, shape, kind = self.policy.weights, self._shapes[index], self._kinds[index]
            parts = read_layer(self._layers[index], store, shape, kind, GatheredLinears)
            if parts.before_attention is None or parts.before_mlp is None:
                raise Unfusable("its layers do not begin with norms")
            self._known[key] = parts
        return self._known[key]


@dataclass(frozen=True)
class _Gathered:
    """One layer of a pass."""

    forward: FusedSharded
    index: int

    def run(self, residual_TE: torch.Tensor, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward.run(self.index, residual_TE, x_TE)


def gradient_gap(policy: ShardedPolicy) -> float:
    """How far the gradient that fused layers hand over is from autograd's through the model's own modules: the worst matrix's, as
    a share of its norm; infinite where one has none. The same number on all ranks, and a collective."""
    trained = {name: one for name, one in policy.weights.sharded.items() if one.whole.requires_grad}
    fused, before = policy.fused_forward, policy.gradients
    vectors = [p for name, p in policy.weights.parameters.items() if p.requires_grad and name not in trained]
    try:
        policy.fused_forward, policy.gradients = None, None
        expected = _probe_gradient(policy, trained)
        policy.fused_forward, policy.gradients = fused, HandedGradients(policy.weights, vectors, policy.handed)
        found = _probe_gradient(policy, trained)
    finally:
        policy.fused_forward, policy.gradients = fused, before
        for parameter in vectors:
            parameter.grad = None
    if not trained:
        return 0.0
    squares = torch.zeros((len(trained), 2), dtype=torch.float64, device=policy.device)
    for row, name in enumerate(trained):
        squares[row, 0] = (found[name].double() - expected[name].double()).square().sum()
        squares[row, 1] = expected[name].double().square().sum()
    apart, size = policy.sum_over_ranks(squares).sqrt().unbind(1)
    return float(torch.where(apart == 0, 0.0, apart / size).nan_to_num(torch.inf, posinf=torch.inf).max())


def _probe_gradient(policy: ShardedPolicy, trained: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's part of the gradient of the probe's log-probs, summed over ranks."""
    tokens, plan = torch.cat(policy._probe_rows()), PackedPlan(PROBE_LENGTHS, policy.device)
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        hidden = policy.hidden(tokens, plan.positions, plan)
        stats = policy.head.token_stats(hidden, tokens, 1.0, len(tokens), policy.gradients)
        stats.logprobs.sum().backward()
    found = {}
    for name, one in trained.items():
        grad = one.whole.grad
        found[name] = torch.zeros_like(one.part) if grad is None else grad.to_local().clone()
        one.whole.grad = None
    policy.reset()
    return found
