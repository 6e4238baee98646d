"""What a model's layers store and how they attend, seen in a forward pass, which needs no weights.

What no comparison of short sequences would show is refused here: a window that attention is not told of, and a layer that attends
several times, of which a cache would keep the last.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from trimtab.base.errors import ModelError
from trimtab.model.attention import AttentionPlan, Rules
from trimtab.model.context import TOKENWISE_LAYERS, config_of_layer
from trimtab.model.latent import latents_of
from trimtab.model.packed import PackedPlan
from trimtab.model.recurrent import Mixer, State


class ShapedModel(Protocol):
    """What is asked of a policy here."""

    body: Any
    config: Any

    @property
    def device(self) -> torch.device: ...

    @property
    def context_tokens(self) -> int: ...

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor: ...


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token, and how it attends."""

    key: tuple[int, int]
    """Heads and head size of keys."""
    value: tuple[int, int]
    """The same of values."""
    heads: int
    rules: Rules
    value_in_key: bool = False
    """The value is the first part of the key, and is stored with it."""

    def bytes_per_token(self, itemsize: int) -> int:
        if self.value_in_key:
            return self.key[0] * self.key[1] * itemsize
        return (self.key[0] * self.key[1] + self.value[0] * self.value[1]) * itemsize


@dataclass(frozen=True)
class StateShape:
    """What one layer carries for one sequence."""

    conv: tuple[int, ...]
    conv_dtype: torch.dtype
    recurrent: tuple[int, ...] | None
    recurrent_dtype: torch.dtype

    @classmethod
    def of(cls, state: State) -> StateShape:
        """The shape of a state of one sequence."""
        found = state.conv if state.recurrent is None else state.recurrent
        shape = None if state.recurrent is None else tuple(found.shape[1:])
        return cls(tuple(state.conv.shape[1:]), state.conv.dtype, shape, found.dtype)

    @property
    def nbytes(self) -> int:
        recurrent = 0 if self.recurrent is None else prod(self.recurrent) * self.recurrent_dtype.itemsize
        return prod(self.conv) * self.conv_dtype.itemsize + recurrent


class _ShapeProbe(PackedPlan):
    """Runs as usual and notes the key and value shapes of each layer, and what it carries."""

    def __init__(self, device: torch.device, latent_layers: Collection[int] = ()) -> None:
        super().__init__([1], device)
        self.latents, self._latent_layers = bool(latent_layers), latent_layers
        self.shapes: dict[int, LayerShape] = {}
        self.states: dict[int, StateShape] = {}

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        if layer in self.shapes:
            raise ModelError(f"its layer {layer} attends more than once in a forward pass")
        key, value = (k_TKD.shape[1], k_TKD.shape[2]), (v_TKD.shape[1], v_TKD.shape[2])
        self.shapes[layer] = LayerShape(key, value, q_THD.shape[1], rules, layer in self._latent_layers)
        return super().attend(layer, q_THD, k_TKD, v_TKD, rules)

    def recur(self, mixer: Mixer, x_TE: torch.Tensor) -> torch.Tensor:
        if mixer.layer_idx in self.states:
            raise ModelError(f"its layer {mixer.layer_idx} carries more than one state")
        out_NLE, state = mixer.mix(x_TE[None], None)
        self.states[mixer.layer_idx] = StateShape.of(state)
        return out_NLE.squeeze(0)


@torch.no_grad()
def layer_shapes(policy: ShapedModel, latents: bool = False) -> dict[int, LayerShape]:
    """What the model really stores, seen in a one-token forward: right for any head layout, with no table of architectures.
    `latents`: where layers make keys and values of a latent, that is stored."""
    return _look(policy, latents_of(policy.body) if latents else ()).shapes


@torch.no_grad()
def state_shapes(policy: ShapedModel) -> dict[int, StateShape]:
    """What the layers that carry a state carry for a sequence; empty for most models."""
    return _look(policy).states


def _look(policy: ShapedModel, latent_layers: Collection[int] = ()) -> _ShapeProbe:
    if not all(getattr(module, "is_causal", True) for module in policy.body.modules()):
        raise ModelError("its attention is not causal (tokens see later tokens)")
    probe = _ShapeProbe(policy.device, latent_layers)
    policy.hidden(torch.zeros(1, dtype=torch.int64, device=policy.device), probe.positions, probe)
    _refuse_silent_layers(policy, probe.shapes, probe.states)
    return probe


def _refuse_silent_layers(policy: ShapedModel, shapes: dict[int, LayerShape], states: dict[int, StateShape]) -> None:
    """Layers that mix tokens by other means than attention, or in a window that they do not speak of."""
    config = policy.config
    layers = getattr(config, "num_hidden_layers", None) or 0
    if not shapes:
        raise ModelError("none of its layers attends, and Trimtab serves states beside keys and values only")
    kinds = getattr(config, "layer_types", None)
    alone = [kinds[index] in TOKENWISE_LAYERS for index in range(layers)] if kinds else [False] * layers
    silent = layers - len(shapes.keys() | states.keys()) - sum(alone)
    if silent > 0:
        raise ModelError(f"{silent} of its {layers} layers do not use attention")
    windows = [getattr(config_of_layer(config, index), "sliding_window", None) for index in range(layers)]
    window = min((window for window in windows if window), default=policy.context_tokens)
    used = getattr(config, "use_sliding_window", True) and (kinds is None or "sliding_attention" in kinds)
    if used and window < policy.context_tokens and all(shape.rules.window is None for shape in shapes.values()):
        raise ModelError(
            f"its layers have a sliding window of {window} tokens and do not pass it to the attention function"
        )
