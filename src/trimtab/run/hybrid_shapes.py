"""The blocks of a model whose layers carry a state, read off the model itself, with weights or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trimtab.model.policy import Policy
from trimtab.model.recurrent import Mixer
from trimtab.model.shapes import LayerShape, StateShape, layer_shapes, state_shapes
from trimtab.plan.mixing import Mixing, gated_delta, short_convolution, state_space
from trimtab.plan.shape import Block


def measured_hybrid_blocks(model: Any, text: Any, layers: Sequence[nn.Module]) -> tuple[Block, ...]:
    """What each layer stores, carries and computes, as a forward pass of one token shows it."""
    seen = _Seen(model)
    attends, carries = layer_shapes(seen), state_shapes(seen)
    return tuple(_block(text, layer, attends.get(index), carries.get(index)) for index, layer in enumerate(layers))


class _Seen(Policy):
    """A model that has been checked, or has no weights: nothing is looked at but its layers."""

    def __init__(self, model: Any) -> None:
        mode = model.training
        super().__init__(model, check=False)
        model.train(mode)


def _block(text: Any, layer: nn.Module, attends: LayerShape | None, carries: StateShape | None) -> Block:
    own = [(name, p) for name, p in layer.named_parameters() if "lora_" not in name]
    count = sum(p.numel() for _, p in own)
    experts = [p for name, p in own if ".experts." in f".{name}" and p.ndim == 3]
    many = experts[0].shape[0] if experts else 0
    used = int(getattr(text, "num_experts_per_tok", 0) or 0) if experts else 0
    routed = sum(p.numel() for p in experts)
    linears = {
        name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear) and "lora_" not in name
    }
    heads, key, value = (0, (0, 0), (0, 0)) if attends is None else (attends.heads, attends.key, attends.value)
    return Block(
        heads, key[0], key[1], value[1],
        width=_expert_width(experts, text.hidden_size) if experts else _width(linears, text.hidden_size),
        parameters=count,
        active=count - routed + (routed * used // many if many else 0),
        window=None if attends is None else attends.rules.window,
        gated=not _has(linears, "up_proj") or _has(linears, "gate_proj"),
        experts=many,
        experts_used=used,
        shared_width=_width({n: m for n, m in linears.items() if "shared" in n}, text.hidden_size) if experts else 0,
        mixing=None if carries is None else _mixing(layer, carries, text.hidden_size),
        own_linears=tuple(
            (name.removesuffix(".base_layer"), linear.in_features, linear.out_features) for name, linear in linears.items()
        ),
    )  # fmt: skip


def _mixing(layer: nn.Module, carries: StateShape, hidden: int) -> Mixing:
    channels, width = carries.conv
    if carries.recurrent is None:
        return short_convolution(hidden, channels, width)
    heads, first, second = carries.recurrent
    mixer = next(module for module in layer.modules() if isinstance(module, Mixer))
    chunk = getattr(mixer, "chunk_size", None)
    if chunk is None:
        return gated_delta(hidden, channels, width, heads, first, second)
    return state_space(hidden, channels, width, heads, first, second, chunk)


def _has(linears: dict[str, nn.Linear], name: str) -> bool:
    return any(found.split(".")[-1] == name or f".{name}." in f".{found}." for found in linears)


def _width(linears: dict[str, nn.Linear], hidden: int) -> int:
    """Width of the feed-forward part: what its last product reads."""
    ends = ("down_proj", "w2", "output_linear")
    found = [m.in_features for n, m in linears.items() if any(_has({n: m}, end) for end in ends)]
    return max(found, default=0)


def _expert_width(experts: Sequence[torch.Tensor], hidden: int) -> int:
    """Of one expert: the products of all its matrices have it as their other side."""
    down = experts[-1]
    return min((side for side in down.shape[1:] if side != hidden), default=hidden)
