"""What a model's layers store and how they attend, seen in a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.model.attention import Rules
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token, and how it attends."""

    key: tuple[int, int]
    """Heads and head size of keys."""
    value: tuple[int, int]
    """The same of values."""
    heads: int
    rules: Rules

    def bytes_per_token(self, itemsize: int) -> int:
        return (self.key[0] * self.key[1] + self.value[0] * self.value[1]) * itemsize


class _ShapeProbe(PackedPlan):
    """Runs as usual and notes the key and value shapes of each layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([1], device)
        self.shapes: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        key, value = (k_TKD.shape[1], k_TKD.shape[2]), (v_TKD.shape[1], v_TKD.shape[2])
        self.shapes[layer] = LayerShape(key, value, q_THD.shape[1], rules)
        return super().attend(layer, q_THD, k_TKD, v_TKD, rules)


@torch.no_grad()
def layer_shapes(policy: Policy) -> dict[int, LayerShape]:
    """What the model really stores, seen in a one-token forward: right for any head layout, with no table of architectures."""
    probe = _ShapeProbe(policy.device)
    policy.hidden(torch.zeros(1, dtype=torch.int64, device=policy.device), probe.positions, probe)
    return probe.shapes
