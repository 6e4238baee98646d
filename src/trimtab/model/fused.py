"""A packed forward pass for training with as few launches and as little kept as the gradient allows.

A layer (layer.py) is four matrix products, attention, and between them single kernels (kernels/train.py), and one node of the
autograd graph with its backward pass written out. Products that read one input are one product (parts.py), and one product is
their gradient, added to the float32 sums of the step where there are some (gradients.py). Adapters are applied beside the
products and have their own gradients; frozen weights have none.

What a layer keeps for its backward pass is a choice, `Policy.keep`:
  ALL     the residual at both norms, in float32; the inputs of the query-key-value, output and gate-up products; what attention
          keeps; gate and up, from which their product is recomputed
  SOME    the same without the norms' results, gate and up: two kernels and the gate-up product are repeated
  INPUT   only the residual it begins with: the whole layer is repeated

The residual is float32 here as in the engine, so what is sampled and what is trained differ by less than in the model's own
modules. The gradient is that of the function computed: tests compare it with autograd through the model's modules in float64.

Shapes: T tokens of a packed row, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from trimtab.model.attention import AttentionPlan
from trimtab.model.kernels import train as kernels
from trimtab.model.layer import LayerCall, run_layer
from trimtab.model.norms import Norm, Rotary
from trimtab.model.parts import ModelParts, Watch, read_parts, rotary_tables
from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes


class FusedForward:
    """Hidden states of a packed row, differentiable in every parameter that asks for it."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._shapes = layer_shapes(policy)
        self._watch = Watch(policy.model)
        self._rotaries: dict[str, Rotary] = {}
        self._known: dict[tuple[object, ...], ModelParts] = {}
        self._read()

    def _read(self) -> None:
        """The parts as the model has them now: parameters may have been put elsewhere, adapters switched off and on."""
        seen = self._watch.look()
        if seen not in self._known:
            if len(self._known) >= 4:
                self._known.clear()
            parts = read_parts(self.policy, self._shapes)
            seen = self._watch.look()  # joining may have moved parameters
            self._known[seen] = parts
        self.parts = self._known[seen]

    def forget(self) -> None:
        """Forget the parts: parameters are put elsewhere."""
        self._known = {}
        vars(self).pop("parts", None)  # there are none yet where memory ran out before they were read

    def __call__(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, longest: int, plan: AttentionPlan
    ) -> torch.Tensor:
        """[T, E]; no sequence of the row has more than `longest` tokens."""
        self._read()
        kinds = (layer.kind for layer in self.parts.layers)
        self._rotaries = rotary_tables(self.policy, kinds, longest, self._rotaries)
        x_TE = F.embedding(tokens_T, self.parts.embedding, self.parts.padding)
        if self.parts.factor != 1.0:
            x_TE = x_TE * self.parts.factor
        first = self._before(0)
        residual_TE, x_TE = FirstNorm.apply(x_TE, None if first is None else first.weight, first)
        for index, layer in enumerate(self.parts.layers):
            self.policy.before_layer(index)
            self.policy.watch_input(residual_TE, index)
            call = LayerCall(
                index, layer, self._before(index), self._before(index + 1), self._rotaries[layer.kind], positions_T, plan,
                self.policy.keep, self.policy.activation_offload, self.policy.gradients,
            )  # fmt: skip
            residual_TE, x_TE = run_layer(residual_TE, x_TE, call)
        return x_TE

    def _before(self, index: int) -> Norm | None:
        """The norm before a layer, if it has one, or after the last."""
        return self.parts.final if index == len(self.parts.layers) else self.parts.layers[index].before_attention


class FirstNorm(torch.autograd.Function):
    """The residual that embeddings begin, and its norm."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, _weight: torch.Tensor | None, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual, out, scales, _ = kernels.add_norm(None, x, norm, None, 1.0)
        ctx.save_for_backward(residual, scales)
        ctx.norm = norm
        ctx.set_materialize_grads(False)
        return residual, out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        residual, scales = ctx.saved_tensors
        dresidual, dy = grads
        assert dy is not None
        _, dx, dweight, _ = kernels.add_norm_back(
            dy.contiguous(), dresidual, residual, dy, scales, scales, ctx.norm, None, 1.0, False
        )
        return dx, None if dweight is None else dweight.to(ctx.norm.weight.dtype), None
