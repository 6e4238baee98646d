"""One decoder layer of the fused training pass, forward and backward, as one node of the autograd graph (see fused.py).

Shapes: T tokens of a packed row, E hidden size, X width of queries, keys and values together, F feed-forward size, H query heads,
K key/value heads, D head size, N heads of all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from trimtab.model.activation_offload import ActivationOffload
from trimtab.model.attention import AttentionPlan
from trimtab.model.gradients import Gradients, add_product
from trimtab.model.keep import Keep
from trimtab.model.kernels import train as kernels
from trimtab.model.kernels.shared import gated
from trimtab.model.norms import Norm, Rotary
from trimtab.model.parts import LayerParts, Linears, run_mixture


def run_layer(residual_TE: torch.Tensor, x_TE: torch.Tensor, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual and its norm after a layer, from those before it.

    Autograd is not told of parameters whose gradients are added to `call.gradients`, unless the residual has no gradient either:
    then it would see no reason for a backward pass.
    """
    if not torch.is_grad_enabled():
        return call.forward(residual_TE, x_TE, _Kept(graph=False))
    tensors = call.tensors
    if call.gradients is not None and residual_TE.requires_grad:
        tensors = [t for t in tensors if t not in call.gradients]
    residual_TE, x_TE = _Layer.apply(residual_TE, x_TE, call, *tensors)
    return residual_TE, x_TE


@dataclass(frozen=True)
class LayerCall:
    """One layer on one packed row."""

    index: int
    layer: LayerParts
    before: Norm | None
    following: Norm | None
    """The norm before the next layer, which this one ends with."""
    rotary: Rotary
    positions: torch.Tensor
    plan: AttentionPlan
    keep: Keep
    offload: ActivationOffload | None
    gradients: Gradients | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the layer is differentiable in."""
        layer, found = self.layer, []
        for linears in layer.linears:
            found += [*linears.weights, *(linears.biases or [])]
            found += [t for adapter in linears.adapters for t in (adapter.a.weight, adapter.b.weight)]
        if layer.head_norm is not None:
            found += [layer.head_norm.query, layer.head_norm.key]
        if layer.mixture is not None:
            found += layer.mixture.parameters()
        if layer.shape.rules.sinks_H is not None:
            found.append(layer.shape.rules.sinks_H)
        norms = (layer.after_attention, layer.before_mlp, layer.after_mlp, self.following)
        return found + [norm.weight for norm in norms if norm is not None]

    def attend(self, x_TE: torch.Tensor, kept: _Kept) -> torch.Tensor:
        """[T, HD]: the row through attention, whose backward pass is autograd's, in a graph of its own."""
        layer = self.layer
        heads, kv_heads = layer.shape.heads, layer.shape.key[0]
        qkv_TX, kept.lows["qkv"] = _apply(x_TE, layer.qkv)
        kept.qkv = qkv_TX if layer.head_norm is not None else None
        if layer.head_norm is not None and layer.head_norm.whole:
            qkv_TX, kept.head_scales = kernels.whole_heads(qkv_TX, layer.head_norm)
        qkv_TND = kernels.rope(qkv_TX, self.positions, heads, kv_heads, self.rotary, layer.each_head_norm)
        kept.q, kept.k, kept.v = (x.detach().requires_grad_() for x in qkv_TND.split((heads, kv_heads, kv_heads), 1))
        with torch.set_grad_enabled(kept.graph):
            kept.attended = self.plan.attend(self.index, kept.q, kept.k, kept.v, layer.shape.rules)
        return kept.attended.detach().flatten(1)

    def forward(self, residual_TE: torch.Tensor, x_TE: torch.Tensor, kept: _Kept) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layer
        kept.x, kept.residual = x_TE, residual_TE
        out_TE, kept.lows["output"] = _apply(self.attend(x_TE, kept), layer.output)
        if layer.parallel:
            kept.middle, kept.y = residual_TE, x_TE
            out_TE += self.feed_forward(kept)
            kept.end, x_TE, kept.end_scales, _ = kernels.add_norm(
                residual_TE, out_TE, self.following, None, layer.factor
            )
            return kept.end, x_TE
        kept.middle, kept.y, kept.scales, kept.post_scales = kernels.add_norm(
            residual_TE, out_TE, layer.before_mlp, layer.after_attention, layer.factor
        )
        kept.attention_out = None if layer.after_attention is None else out_TE
        out_TE = self.feed_forward(kept)
        kept.end, x_TE, kept.end_scales, kept.end_post_scales = kernels.add_norm(
            kept.middle, out_TE, self.following, layer.after_mlp, layer.factor
        )
        kept.mlp_out = None if layer.after_mlp is None else out_TE
        return kept.end, x_TE

    def feed_forward(self, kept: _Kept) -> torch.Tensor:
        dense = self.layer.dense
        if dense is None:
            return self.mixture(kept)
        kept.gate_up, kept.lows["gate_up"] = _apply(kept.y, dense.gate_up)
        product_TF = kept.gate_up.new_empty((kept.gate_up.shape[0], kept.gate_up.shape[1] // 2))
        gated(kept.gate_up, product_TF, dense.activation)
        out_TE, kept.lows["down"] = _apply(product_TF, dense.down)
        return out_TE

    def mixture(self, kept: _Kept) -> torch.Tensor:
        """Router and experts, whose backward pass is autograd's, in a graph of its own; gradients of stacked weights go to
        the sums of the step from there (experts.py)."""
        assert self.layer.mixture is not None
        kept.routed = kept.y.detach().requires_grad_()
        with torch.set_grad_enabled(kept.routes):
            out_TE = run_mixture(self.layer.mixture, kept.routed)
        if kept.routes:
            kept.mixed = get_gradient_edge(out_TE)  # which does not keep the result
        return out_TE.detach()

    def repeat(self, kept: _Kept) -> None:
        """Recompute what was not kept."""
        dtype = self.layer.output.dtype
        if kept.x is None:
            kept.x = kernels.norm(kept.residual, self.before, dtype)
        if kept.middle is None:
            self.forward(kept.residual, kept.x, kept)
        elif kept.y is None:
            kept.y = kept.x if self.layer.parallel else kernels.norm(kept.middle, self.layer.before_mlp, dtype)
            if self.layer.dense is None:
                self.mixture(kept)
            else:
                kept.gate_up, kept.lows["gate_up"] = _apply(kept.y, self.layer.dense.gate_up)

    def backward(
        self, dend_TE: torch.Tensor | None, dx_TE: torch.Tensor, kept: _Kept, found: _Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the residual and of x; those of parameters go to `found`."""
        layer = self.layer
        dmiddle_TE, dout_TE = self._norm_back(
            dx_TE, dend_TE, kept.end, kept.mlp_out, kept.end_scales, kept.end_post_scales, self.following, layer.after_mlp, found
        )  # fmt: skip
        dy_TE, dresidual_TE = self._feed_forward_back(dout_TE, kept, found), dmiddle_TE
        if not layer.parallel:
            dresidual_TE, dout_TE = self._norm_back(
                dy_TE, dmiddle_TE, kept.middle, kept.attention_out, kept.scales, kept.post_scales, layer.before_mlp,
                layer.after_attention, found,
            )  # fmt: skip
        dattended, dlows = _input_grad(dout_TE, layer.output)
        found.linears(layer.output, dout_TE, kept.attended.detach().flatten(1), kept.lows["output"], dlows)
        inputs, sinks = (kept.q, kept.k, kept.v), layer.shape.rules.sinks_H
        learned = () if sinks is None or not sinks.requires_grad else (sinks,)
        dq, dk, dv, *dsinks = torch.autograd.grad(kept.attended, (*inputs, *learned), dattended.view_as(kept.attended))
        for parameter, grad in zip(learned, dsinks):
            found.add(parameter, grad)
        dqkv, dquery, dkey = kernels.rope_back(
            dq.contiguous(),
            dk.contiguous(),
            dv.contiguous(),
            kept.qkv,
            self.positions,
            self.rotary,
            layer.each_head_norm,
        )
        if layer.head_norm is not None and layer.head_norm.whole:
            dquery, dkey = kernels.whole_heads_back(dqkv, kept.qkv, layer.head_norm, kept.head_scales)
        if layer.head_norm is not None:
            assert dquery is not None and dkey is not None
            found.add(layer.head_norm.query, dquery)
            found.add(layer.head_norm.key, dkey)
        dx_TE, dlows = _input_grad(dqkv, layer.qkv)
        found.linears(layer.qkv, dqkv, kept.x, kept.lows["qkv"], dlows)
        return dresidual_TE, dx_TE.add_(dy_TE) if layer.parallel else dx_TE

    def _feed_forward_back(self, dout_TE: torch.Tensor, kept: _Kept, found: _Found) -> torch.Tensor:
        dense, mixture = self.layer.dense, self.layer.mixture
        if dense is None:
            assert mixture is not None
            trained = [p for p in mixture.parameters() if p.requires_grad]
            dy_TE, *grads = torch.autograd.grad(kept.mixed, [kept.routed, *trained], dout_TE, allow_unused=True)
            for parameter, grad in zip(trained, grads):
                if grad is not None:  # None: it is in the sums of the step already
                    found.add(parameter, grad)
            kept.mixed = kept.routed = None
            return dy_TE.contiguous()
        dproduct_TF, dlows = _input_grad(dout_TE, dense.down)
        dgate_up, product_TF = kernels.gated_back(kept.gate_up, dproduct_TF, dense.activation)
        found.linears(dense.down, dout_TE, product_TF, kept.lows["down"], dlows)
        dy_TE, dlows = _input_grad(dgate_up, dense.gate_up)
        found.linears(dense.gate_up, dgate_up, kept.y, kept.lows["gate_up"], dlows)
        return dy_TE

    def _norm_back(
        self, dy: torch.Tensor, dresidual: torch.Tensor | None, residual: torch.Tensor, x: torch.Tensor | None,
        scales: torch.Tensor, post_scales: torch.Tensor, pre: Norm | None, post: Norm | None, found: _Found,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        before, dx, dpre, dpost = kernels.add_norm_back(
            dy, dresidual, residual, dy if x is None else x, scales, scales if post is None else post_scales, pre, post,
            self.layer.factor, True,
        )  # fmt: skip
        if pre is not None and dpre is not None:
            found.add(pre.weight, dpre)
        if post is not None and dpost is not None:
            found.add(post.weight, dpost)
        assert before is not None
        return before, dx


@dataclass(slots=True)
class _Kept:
    """What a layer's backward pass reads: tensors, or None where they are not kept or do not exist."""

    graph: bool
    """Attention records its own backward pass."""
    routes: bool = False
    """So do router and experts."""
    q: Any = None
    k: Any = None
    v: Any = None
    attended: Any = None
    routed: Any = None
    """What router and experts read, and `mixed` what they made: a graph of their own."""
    mixed: Any = None
    residual: Any = None
    x: Any = None
    qkv: Any = None
    head_scales: Any = None
    """Of norms over all heads together."""
    middle: Any = None
    """The residual between attention and feed-forward part."""
    y: Any = None
    scales: Any = None
    post_scales: Any = None
    attention_out: Any = None
    gate_up: Any = None
    end: Any = None
    end_scales: Any = None
    end_post_scales: Any = None
    mlp_out: Any = None
    lows: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Low-rank images under the adapters, by product."""

    def pack(self, keep: Keep) -> tuple[list[torch.Tensor | None], dict[str, int]]:
        """The tensors to keep, and how many low-rank images of each product are among them."""
        if keep is Keep.INPUT:
            return [self.residual], {}
        if keep is Keep.SOME:
            self.x = self.y = self.gate_up = None
            self.lows.pop("gate_up", None)
        lows = [low for part in self.lows.values() for low in part]
        return [*(getattr(self, name) for name in _TENSORS), *lows], {
            name: len(part) for name, part in self.lows.items()
        }

    def unpack(self, tensors: Sequence[torch.Tensor | None], counts: dict[str, int]) -> None:
        for name, tensor in zip(_TENSORS, tensors):
            setattr(self, name, tensor)
        left = list(tensors[len(_TENSORS) :])
        for name, count in counts.items():
            self.lows[name] = [low for low in left[:count] if low is not None]
            left = left[count:]


_ATTENTION, _MIXTURE = ("q", "k", "v", "attended"), ("routed", "mixed")
"""Ends of graphs that are autograd's."""
_TENSORS = [f.name for f in fields(_Kept) if f.name not in ("graph", "routes", "lows", *_ATTENTION, *_MIXTURE)]


class _Found:
    """Gradients of parameters: added to the sums of the step, or held for autograd where there are none."""

    def __init__(self, gradients: Gradients | None) -> None:
        self._gradients = gradients
        self.held: dict[int, torch.Tensor] = {}
        """Gradients by the id of their parameter."""

    def add(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        if not tensor.requires_grad:
            return
        total = None if self._gradients is None else self._gradients.of(tensor)
        if total is None:
            self.held[id(tensor)] = grad.to(tensor.dtype)
        else:
            total += grad

    def linears(
        self, linears: Linears, dout: torch.Tensor, x: torch.Tensor, lows: Sequence[torch.Tensor], dlows: Sequence[torch.Tensor]
    ) -> None:  # fmt: skip
        if any(weight.requires_grad for weight in linears.weights):
            self._product(linears, dout, x)
        if linears.biases is not None and any(bias.requires_grad for bias in linears.biases):
            rows = [bias.shape[0] for bias in linears.biases]
            for bias, part in zip(linears.biases, dout.sum(0, dtype=torch.float32).split(rows)):
                self.add(bias, part)
        for adapter, low, dlow in zip(linears.adapters, lows, dlows):
            part = dout[:, adapter.start : adapter.end]
            if adapter.a.weight.requires_grad:
                self.add(adapter.a.weight, dlow.t() @ x)
            if adapter.b.weight.requires_grad:
                self.add(adapter.b.weight, (part.t() @ low).mul_(adapter.scale))

    def _product(self, linears: Linears, dout: torch.Tensor, x: torch.Tensor) -> None:
        total = None if self._gradients is None else self._gradients.of(*linears.weights)
        if total is not None:
            add_product(total, dout.t(), x)
            return
        for weight, grad in zip(linears.weights, (dout.t() @ x).split([w.shape[0] for w in linears.weights])):
            if weight.requires_grad:
                assert id(weight) not in self.held
                self.held[id(weight)] = grad


class _Layer(torch.autograd.Function):
    """A decoder layer from residual and norm to residual and norm."""

    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, x: torch.Tensor, call: LayerCall, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needed = any(ctx.needs_input_grad)
        kept = _Kept(needed and call.keep is not Keep.INPUT, needed and call.keep is Keep.ALL)
        out = call.forward(residual, x, kept)
        if needed:
            away = call.keep is Keep.INPUT and call.offload is not None
            ctx.offloaded = call.offload.put(residual) if away and call.offload is not None else None
            held, ctx.counts = kept.pack(call.keep)
            ctx.save_for_backward(*([] if away else held))
            ctx.order = [id(t) for t in tensors]
            ends = (*_ATTENTION[: 4 * kept.graph], *_MIXTURE[: 2 * kept.routes])
            ctx.graphs = {name: getattr(kept, name) for name in ends}
            ctx.call, ctx.done = call, False
            ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dend, dx = grads
        assert dx is not None
        call: LayerCall = ctx.call
        assert not ctx.done, "a layer's backward pass runs once"
        ctx.done = True
        kept = _Kept(graph=True, routes=True)
        if ctx.offloaded is not None:
            assert call.offload is not None
            kept.residual = call.offload.take(ctx.offloaded)
            ctx.offloaded = None
        elif call.keep is Keep.INPUT:
            (kept.residual,) = ctx.saved_tensors
        else:
            kept.unpack(ctx.saved_tensors, ctx.counts)
            for name, end in ctx.graphs.items():
                setattr(kept, name, end)
            ctx.graphs = None
        call.repeat(kept)
        found = _Found(call.gradients)
        dresidual, dx = call.backward(dend, dx.contiguous(), kept, found)
        return dresidual, dx, None, *(found.held.get(key) for key in ctx.order)


def _apply(x_TI: torch.Tensor, linears: Linears) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The product, and the low-rank images of x under the adapters."""
    out = linears.product(x_TI)
    lows = []
    for adapter in linears.adapters:
        low = x_TI @ adapter.a.weight.to(x_TI.dtype).t()
        out[:, adapter.start : adapter.end].addmm_(low, adapter.b.weight.to(x_TI.dtype).t(), alpha=adapter.scale)
        lows.append(low)
    return out, lows


def _input_grad(dout_TO: torch.Tensor, linears: Linears) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradients of x and of its low-rank images."""
    dx, dlows = linears.input_gradient(dout_TO), []
    for adapter in linears.adapters:
        part = dout_TO[:, adapter.start : adapter.end]
        dlow = (part @ adapter.b.weight.to(part.dtype)).mul_(adapter.scale)
        dx.addmm_(dlow, adapter.a.weight.to(part.dtype))
        dlows.append(dlow)
    return dx, dlows
