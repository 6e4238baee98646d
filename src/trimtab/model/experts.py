"""The experts of a mixture layer as grouped products, forward and backward, with the adapters on them.

transformers stacks the weights of a layer's experts and lets a library say how they are run (its experts interface); a policy's
modules run them as written here, the fused layers too. Kept for the backward pass are the layer's input and what the first
product made; the sums of weight gradients are added to directly where the step has some (gradients.py).

The gradient of an expert's weight in the mixture needs no output of the expert: with u the gradient of an unweighted output
brought back through the second product, it is the sum of (gated input of that product) x u.

Shapes: T tokens, K experts of each token, S = T K pairs of both, sorted by expert, G experts, E hidden size, F an expert's width,
r rank of an adapter.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from trimtab.model.gradients import Gradients
from trimtab.model.grouped import ExpertOrder, add_outer, product

EXPERTS_NAME = "trimtab"
GRADIENTS = "_trimtab_gradients"
"""Attribute of a module of experts: a weak reference to the sums of the step."""


@dataclass(frozen=True)
class ExpertAdapter:
    """A low-rank addition to every expert's matrix, as PEFT lays it out: A is [r G, I], expert by expert; B is [O, r G], the rank
    outside and the experts inside."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Stacked:
    """One matrix of every expert."""

    weight: torch.Tensor
    """[G, O, I], or [G, I, O] where `transposed`."""
    transposed: bool = False
    bias: torch.Tensor | None = None
    adapters: tuple[ExpertAdapter, ...] = ()

    @property
    def w_GIO(self) -> torch.Tensor:
        return self.weight if self.transposed else self.weight.transpose(1, 2)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [
            self.weight,
            *([] if self.bias is None else [self.bias]),
            *(t for a in self.adapters for t in (a.a, a.b)),
        ]

    def factors(self, adapter: ExpertAdapter) -> tuple[torch.Tensor, torch.Tensor]:
        """[G, I, r] and [G, r, O] in the weights' type."""
        experts, dtype = self.weight.shape[0], self.weight.dtype
        a_GIr = adapter.a.to(dtype).unflatten(0, (experts, -1)).transpose(1, 2)
        b_GrO = adapter.b.to(dtype).unflatten(1, (-1, experts)).permute(2, 1, 0)
        return a_GIr, b_GrO

    def apply(self, x_SI: torch.Tensor, order: ExpertOrder) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The product, and the low-rank images of x under the adapters."""
        out, lows = product(x_SI, self.w_GIO, order), []
        if self.bias is not None:
            out += self.bias.index_select(0, order.expert_S)
        for adapter in self.adapters:
            a_GIr, b_GrO = self.factors(adapter)
            lows.append(product(x_SI, a_GIr, order))
            out.add_(product(lows[-1], b_GrO, order), alpha=adapter.scale)
        return out, lows

    def input_grad(self, dout_SO: torch.Tensor, order: ExpertOrder) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Gradients of x and of its low-rank images."""
        dx, dlows = product(dout_SO, self.w_GIO.transpose(1, 2), order), []
        for adapter in self.adapters:
            a_GIr, b_GrO = self.factors(adapter)
            dlows.append(product(dout_SO, b_GrO.transpose(1, 2), order).mul_(adapter.scale))
            dx += product(dlows[-1], a_GIr.transpose(1, 2), order)
        return dx, dlows


@dataclass(frozen=True)
class Experts:
    """The experts of one layer."""

    up: Stacked
    """The first product: gate and up, or up alone."""
    down: Stacked
    gate: Callable[[torch.Tensor], torch.Tensor]
    """What stands between the products."""

    @property
    def count(self) -> int:
        return self.down.weight.shape[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.up.tensors, *self.down.tensors]


@dataclass
class KeptExperts:
    """What the backward pass reads."""

    order: ExpertOrder | None = None
    up: torch.Tensor | None = None
    lows: dict[str, list[torch.Tensor]] = field(default_factory=dict)


AddGradient = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes over the gradient of a parameter."""
SumOf = Callable[[torch.Tensor], torch.Tensor | None]
"""The sum of a parameter's gradients; None where there is none."""


def forward(
    x_TE: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor, experts: Experts, kept: KeptExperts
) -> torch.Tensor:
    order = ExpertOrder.of(index_TK, experts.count)
    up, kept.lows["up"] = experts.up.apply(order.spread(x_TE), order)
    kept.order, kept.up = order, up
    out_SE, kept.lows["down"] = experts.down.apply(experts.gate(up), order)
    return order.combine(out_SE, weights_TK)


def backward(
    dout_TE: torch.Tensor, x_TE: torch.Tensor, weights_TK: torch.Tensor, experts: Experts, kept: KeptExperts,
    add: AddGradient, sum_of: SumOf,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of the input and of the weights of the mixture; those of parameters go to `add`."""
    order, up = kept.order, kept.up
    assert order is not None and up is not None
    with torch.enable_grad():
        up = up.detach().requires_grad_()
        gated = experts.gate(up)
    inner, dout_SE = gated.detach(), order.spread(dout_TE)
    back, dlows = experts.down.input_grad(dout_SE, order)
    share_S = _dots(inner, back)
    if experts.down.bias is not None:
        share_S += _dots(dout_SE, experts.down.bias.index_select(0, order.expert_S))
    dweights = share_S.index_select(0, order.back_S).view_as(weights_TK).to(weights_TK.dtype)
    scale_S1 = order.sorted(weights_TK)[:, None].to(inner.dtype)
    # dout of the weighted output is w dout: the other factor of each product takes w.
    _weight_grads(experts.down, dout_SE, inner * scale_S1, scale_S1, kept.lows["down"], dlows, order, add, sum_of)
    del inner, dout_SE
    (dup,) = torch.autograd.grad(gated, up, back.mul_(scale_S1))
    del gated, back
    x_SE = order.spread(x_TE)
    dx_SE, dlows = experts.up.input_grad(dup, order)
    _weight_grads(experts.up, dup, x_SE, None, kept.lows["up"], dlows, order, add, sum_of)
    return order.combine(dx_SE), dweights


def _dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[S]: the dot product of each row with its other."""
    return torch.bmm(a[:, None, :], b[:, :, None]).flatten()


def _weight_grads(
    stacked: Stacked, dout: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, lows: Sequence[torch.Tensor],
    dlows: Sequence[torch.Tensor], order: ExpertOrder, add: AddGradient, sum_of: SumOf,
) -> None:  # fmt: skip
    """`x` has what the gradient of the output is scaled by already; `scale`: the same, one number a row."""

    def grow(parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor, shape: tuple[int, ...]) -> None:
        total = sum_of(parameter)
        if total is not None:
            add_outer(total.view(shape), left, right, order)
            return
        wide = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.zeros(shape, dtype=wide, device=parameter.device)
        add_outer(total, left, right, order)
        add(parameter, total.view(parameter.shape))

    weight, experts = stacked.weight, stacked.weight.shape[0]
    if weight.requires_grad:
        grow(weight, *((x, dout) if stacked.transposed else (dout, x)), tuple(weight.shape))
    if stacked.bias is not None and stacked.bias.requires_grad:
        ones = dout.new_ones((dout.shape[0], 1)) if scale is None else scale
        grow(stacked.bias, dout, ones, (experts, dout.shape[1], 1))
    for adapter, low, dlow in zip(stacked.adapters, lows, dlows):
        rank = low.shape[1]
        if adapter.a.requires_grad:
            grow(adapter.a, dlow, x, (experts, rank, x.shape[1]))
        if adapter.b.requires_grad:
            scaled = low * adapter.scale if scale is None else low * (adapter.scale * scale)
            found = torch.zeros((experts, rank, dout.shape[1]), dtype=adapter.b.dtype, device=dout.device)
            add_outer(found, scaled, dout, order)
            add(adapter.b, found.permute(2, 1, 0).reshape(adapter.b.shape))


class _Mixture(torch.autograd.Function):
    """All of a layer's experts as one node."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, experts: Experts, sum_of: SumOf,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        kept = KeptExperts()
        out = forward(x, index, weights, experts, kept)
        if any(ctx.needs_input_grad):
            lows = [low for part in kept.lows.values() for low in part]
            ctx.counts = {name: len(part) for name, part in kept.lows.items()}
            ctx.save_for_backward(x, weights, kept.up, *lows)
            ctx.order, ctx.experts, ctx.sum_of = kept.order, experts, sum_of
            ctx.names = [id(t) for t in tensors]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, up, *lows = ctx.saved_tensors
        kept = KeptExperts(ctx.order, up)
        for name, count in ctx.counts.items():
            kept.lows[name], lows = lows[:count], lows[count:]
        held: dict[int, torch.Tensor] = {}
        dx, dweights = backward(
            grads[0].contiguous(), x, weights, ctx.experts, kept,
            lambda parameter, grad: held.update({id(parameter): grad.to(parameter.dtype)}), ctx.sum_of,
        )  # fmt: skip
        return dx, dweights, None, None, None, *(held.get(name) for name in ctx.names)


def run_experts(
    module: Any, x_TE: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor,
    adapters: dict[str, tuple[ExpertAdapter, ...]] | None = None,
) -> torch.Tensor:  # fmt: skip
    """A module of stacked experts, with adapters by the name of the weight that they add to."""
    experts = experts_of(module, adapters)
    reference = getattr(module, GRADIENTS, None)
    gradients: Gradients | None = None if reference is None else reference()
    sum_of: SumOf = (lambda _: None) if gradients is None else gradients.of
    out: torch.Tensor = _Mixture.apply(x_TE, weights_TK, index_TK, experts, sum_of, *experts.tensors)
    return out


def experts_of(module: Any, adapters: dict[str, tuple[ExpertAdapter, ...]] | None = None) -> Experts:
    """The stacked weights of a module that transformers marks as one of experts."""
    first = "gate_up_proj" if module.has_gate else "up_proj"

    def stacked(name: str) -> Stacked:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return Stacked(getattr(module, name), module.is_transposed, bias, (adapters or {}).get(name, ()))

    return Experts(stacked(first), stacked("down_proj"), module._apply_gate if module.has_gate else module.act_fn)


def _forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls."""
    return run_experts(module, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _forward)


def expert_modules(model: nn.Module) -> list[Any]:
    """Its modules of stacked experts that grouped products serve, first layer first."""
    return [module for module in model.modules() if _served(module)]


def _served(module: Any) -> bool:
    marked = all(
        hasattr(module, name) for name in ("is_transposed", "has_bias", "has_gate", "down_proj", "_apply_gate")
    )
    return marked and not getattr(module, "has_post_expert_norm", False)


def use_grouped_experts(model: Any, grouped: bool = True) -> None:
    """Run the model's experts as written here, or as transformers writes them out."""
    if expert_modules(model):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.set_experts_implementation(EXPERTS_NAME if grouped else "eager")


def add_expert_gradients_to(model: nn.Module, gradients: Gradients | None) -> None:
    """From now on gradients of stacked weights are added to these sums where they are in them."""
    for module in expert_modules(model):
        setattr(module, GRADIENTS, None if gradients is None else weakref.ref(gradients))
