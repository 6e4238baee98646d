"""A packed forward pass for training with as few launches and as little kept as the gradient allows.

A layer is four matrix products, attention, and between them single kernels (kernels/train.py). Kept for the backward pass are the
residual at both norms, in float32; the inputs of the query-key-value, output and gate-up products; what attention keeps; gate
and up, from which their product is made again. Products that read one input are one product (parts.py), and one product is
their gradient. Adapters are applied beside the products and have their own gradients; frozen weights have none.

The residual is float32 here as in the engine, so what is sampled and what is trained differ by less than in the model's own
modules. The gradient is that of the function computed: tests compare it with autograd through the model's modules in float64.

Shapes: T tokens of a packed row, E hidden size, X width of queries, keys and values together, N heads of all three, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trimtab.model.attention import AttentionPlan
from trimtab.model.kernels import train as kernels
from trimtab.model.kernels.shared import gated
from trimtab.model.parts import (
    HeadNorm,
    Linears,
    ModelParts,
    Norm,
    Rotary,
    Unfusable,
    look_at,
    read_parts,
    rotary_table,
)
from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes

Grads = tuple[torch.Tensor | None, ...]


class FusedForward:
    """Hidden states of a packed row, differentiable in every parameter that asks for it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._shapes = layer_shapes(policy)
        self._rotaries: dict[str, Rotary] = {}
        self._known: dict[tuple[object, ...], ModelParts] = {}
        self._read()
        for layer in self.parts.layers:
            if layer.before_attention is None or layer.before_mlp is None:
                raise Unfusable("its layers do not begin with norms")

    def _read(self) -> None:
        """The parts as the model has them now: parameters may have been put elsewhere, adapters switched off and on."""
        seen = look_at(self.policy.model)
        if seen not in self._known:
            if len(self._known) >= 4:
                self._known.clear()
            parts = read_parts(self.policy, self._shapes)
            seen = look_at(self.policy.model)  # joining may have moved parameters
            self._known[seen] = parts
        self.parts = self._known[seen]

    def __call__(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, longest: int, plan: AttentionPlan
    ) -> torch.Tensor:
        """[T, E]; no sequence of the row has more than `longest` tokens."""
        self._read()
        self._know_positions(longest)
        x_TE = F.embedding(tokens_T, self.parts.embedding, self.parts.padding)
        if self.parts.factor != 1.0:
            x_TE = x_TE * self.parts.factor
        first = self.parts.layers[0].before_attention
        assert first is not None
        residual_TE, x_TE = _add_norm(None, x_TE, first, None, 1.0)
        remember = torch.is_grad_enabled() and self.policy.model.is_gradient_checkpointing
        for index in range(len(self.parts.layers)):
            if remember:
                residual_TE, x_TE = checkpoint(
                    self._layer,
                    index,
                    residual_TE,
                    x_TE,
                    positions_T,
                    plan,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                residual_TE, x_TE = self._layer(index, residual_TE, x_TE, positions_T, plan)
        return x_TE

    def _layer(
        self, index: int, residual_TE: torch.Tensor, x_TE: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.parts.layers[index]
        heads, (kv_heads, _) = layer.shape.heads, layer.shape.key
        qkv_TX = _product(x_TE, layer.qkv)
        qkv = _turn(qkv_TX, positions_T, heads, kv_heads, self._rotaries[layer.kind], layer.head_norm)
        attended = plan.attend(index, *qkv, layer.shape.rules)
        out_TE = _product(attended.flatten(1), layer.output)
        assert layer.before_mlp is not None
        residual_TE, x_TE = _add_norm(residual_TE, out_TE, layer.before_mlp, layer.after_attention, layer.factor)
        out_TE = _gated_product(_product(x_TE, layer.gate_up), layer.activation, layer.down)
        return _add_norm(residual_TE, out_TE, self._following(index), layer.after_mlp, layer.factor)

    def _following(self, index: int) -> Norm:
        if index + 1 == len(self.parts.layers):
            return self.parts.final
        norm = self.parts.layers[index + 1].before_attention
        assert norm is not None
        return norm

    def _know_positions(self, longest: int) -> None:
        known = next(iter(self._rotaries.values())).cos.shape[0] if self._rotaries else 0
        if known < longest:
            positions = max(1024, 1 << (longest - 1).bit_length())
            kinds = {layer.kind for layer in self.parts.layers}
            self._rotaries = {kind: rotary_table(self.policy, kind, positions) for kind in kinds}


def _add_norm(
    residual_TE: torch.Tensor | None, x_TE: torch.Tensor, pre: Norm, post: Norm | None, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = None if post is None else post.weight
    out: tuple[torch.Tensor, torch.Tensor] = _AddNorm.apply(residual_TE, x_TE, pre.weight, weight, pre, post, factor)
    return out


class _AddNorm(torch.autograd.Function):
    """The residual with something added to it, and the norm of the sum."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor | None, x: torch.Tensor, _pre_weight: torch.Tensor, _post_weight: torch.Tensor | None,
        pre: Norm, post: Norm | None, factor: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out_residual, out, scales, post_scales = kernels.add_norm(residual, x, pre, post, factor)
        ctx.save_for_backward(out_residual, x if post is not None else None, scales, post_scales)
        ctx.pre, ctx.post, ctx.factor, ctx.has_residual = pre, post, factor, residual is not None
        ctx.set_materialize_grads(False)
        return out_residual, out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Grads:
        dresidual, dy = grads
        out_residual, x, scales, post_scales = ctx.saved_tensors
        assert dy is not None
        dresidual, dx, dpre, dpost = kernels.add_norm_back(
            dy.contiguous(), dresidual, out_residual, dy if x is None else x, scales, post_scales, ctx.pre, ctx.post,
            ctx.factor, ctx.has_residual,
        )  # fmt: skip
        wanted = ctx.needs_input_grad
        return (
            dresidual, dx, dpre.to(ctx.pre.weight.dtype) if wanted[2] else None,
            dpost.to(ctx.post.weight.dtype) if wanted[3] and dpost is not None else None, None, None, None,
        )  # fmt: skip


def _turn(
    qkv_TX: torch.Tensor, positions_T: torch.Tensor, heads: int, kv_heads: int, rotary: Rotary, norm: HeadNorm | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key = (None, None) if norm is None else (norm.query, norm.key)
    q_THD, k_TKD, v_TKD = _Turn.apply(qkv_TX, query, key, positions_T, heads, kv_heads, rotary, norm)
    return q_THD, k_TKD, v_TKD


class _Turn(torch.autograd.Function):
    """Queries, keys and values of a packed row, the first two normalised and rotated."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, _query: torch.Tensor | None, _key: torch.Tensor | None, positions: torch.Tensor,
        heads: int, kv_heads: int, rotary: Rotary, norm: HeadNorm | None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(qkv if norm is not None else None, positions)
        ctx.settings = (rotary, norm)
        return kernels.turn(qkv, positions, heads, kv_heads, rotary, norm).split((heads, kv_heads, kv_heads), 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        qkv, positions = ctx.saved_tensors
        rotary, norm = ctx.settings
        dq, dk, dv = (grad.contiguous() for grad in grads)
        dqkv, dquery, dkey = kernels.turn_back(dq, dk, dv, qkv, positions, rotary, norm)
        if norm is not None:
            dquery = dquery.to(norm.query.dtype) if ctx.needs_input_grad[1] and dquery is not None else None
            dkey = dkey.to(norm.key.dtype) if ctx.needs_input_grad[2] and dkey is not None else None
        return dqkv, dquery, dkey, None, None, None, None, None


def _tensors(linears: Linears) -> list[torch.Tensor]:
    """What a product is differentiable in: weights, biases, and both factors of each adapter."""
    adapters = [t for a in linears.adapters for t in (a.a.weight, a.b.weight)]
    return [*linears.weights, *(linears.biases or []), *adapters]


def _product(x_TI: torch.Tensor, linears: Linears) -> torch.Tensor:
    out: torch.Tensor = _Product.apply(x_TI, linears, *_tensors(linears))
    return out


def _gated_product(x_T2F: torch.Tensor, activation: int, linears: Linears) -> torch.Tensor:
    out: torch.Tensor = _GatedProduct.apply(x_T2F, activation, linears, *_tensors(linears))
    return out


class _Product(torch.autograd.Function):
    """x W^T + b, and what adapters add to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linears: Linears, *_parameters: torch.Tensor) -> torch.Tensor:
        out, lows = _apply(x, linears)
        ctx.save_for_backward(x, *lows)
        ctx.linears = linears
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        x, *lows = ctx.saved_tensors
        dout = grads[0].contiguous()
        dx, dlows = _input_grad(dout, ctx.linears) if ctx.needs_input_grad[0] or lows else (None, [])
        return dx, None, *_parameter_grads(dout, x, lows, dlows, ctx.linears, ctx.needs_input_grad[2:])


class _GatedProduct(torch.autograd.Function):
    """(act(gate) * up) W^T + b; the product in brackets is made again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, activation: int, linears: Linears, *_parameters: torch.Tensor
    ) -> torch.Tensor:
        product = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        gated(gate_up, product, activation)
        out, lows = _apply(product, linears)
        ctx.save_for_backward(gate_up, *lows)
        ctx.activation, ctx.linears = activation, linears
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Grads:
        gate_up, *lows = ctx.saved_tensors
        dout = grads[0].contiguous()
        dx, dlows = _input_grad(dout, ctx.linears)
        dgate_up, x = kernels.gated_back(gate_up, dx, ctx.activation)
        return dgate_up, None, None, *_parameter_grads(dout, x, lows, dlows, ctx.linears, ctx.needs_input_grad[3:])


def _apply(x_TI: torch.Tensor, linears: Linears) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The product, and the low-rank images of x under the adapters."""
    out = torch.mm(x_TI, linears.weight.t()) if linears.bias is None else F.linear(x_TI, linears.weight, linears.bias)
    lows = []
    for adapter in linears.adapters:
        low = x_TI @ adapter.a.weight.to(x_TI.dtype).t()
        out[:, adapter.start : adapter.end].addmm_(low, adapter.b.weight.to(x_TI.dtype).t(), alpha=adapter.scale)
        lows.append(low)
    return out, lows


def _input_grad(dout_TO: torch.Tensor, linears: Linears) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradients of x and of its low-rank images."""
    dx, dlows = dout_TO @ linears.weight, []
    for adapter in linears.adapters:
        part = dout_TO[:, adapter.start : adapter.end]
        dlow = (part @ adapter.b.weight.to(part.dtype)).mul_(adapter.scale)
        dx.addmm_(dlow, adapter.a.weight.to(part.dtype))
        dlows.append(dlow)
    return dx, dlows


def _parameter_grads(
    dout_TO: torch.Tensor, x_TI: torch.Tensor, lows: Sequence[torch.Tensor], dlows: Sequence[torch.Tensor],
    linears: Linears, wanted: Sequence[bool],
) -> list[torch.Tensor | None]:  # fmt: skip
    """In the order of `_tensors`; None for those that nobody wants."""
    found: list[torch.Tensor | None] = [None] * len(wanted)
    count, biases = len(linears.weights), len(linears.biases or [])
    rows = [w.shape[0] for w in linears.weights]
    if any(wanted[:count]):
        found[:count] = (dout_TO.t() @ x_TI).split(rows)
    if any(wanted[count : count + biases]):
        found[count : count + biases] = dout_TO.sum(0, dtype=torch.float32).to(dout_TO.dtype).split(rows)
    for i, (adapter, low, dlow) in enumerate(zip(linears.adapters, lows, dlows)):
        part = dout_TO[:, adapter.start : adapter.end]
        at = count + biases + 2 * i
        if wanted[at]:
            found[at] = (dlow.t() @ x_TI).to(adapter.a.weight.dtype)
        if wanted[at + 1]:
            found[at + 1] = (part.t() @ low).mul_(adapter.scale).to(adapter.b.weight.dtype)
    return [grad if need else None for grad, need in zip(found, wanted)]
