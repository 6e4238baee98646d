"""Whole copies of a model that ranks hold in parts: the engine's own (rollout), and one on the host to export.

`skeleton_of` is taken before the model is cut; `empty_copy` makes a model of it with memory for weights and no values; `fill`
gathers one parameter after the other into such a copy. All ranks call `fill`, also those that have no copy.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from trimtab.model.weights import WeightStore


def skeleton_of(model: Any) -> Any:
    """The model without weights: its parameters are on the meta device. Tied ones stay tied."""
    return _with_parameters(model, torch.device("meta"))


def empty_copy(skeleton: Any, device: torch.device) -> Any:
    """A model like the skeleton whose weights are on a device and undefined."""
    made = _with_parameters(skeleton, device)
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return made


def _with_parameters(model: Any, device: torch.device) -> Any:
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def fill(made: Any | None, model: Any, weights: WeightStore, frozen: bool = True) -> None:
    """Make a copy's weights the model's. A collective: a rank that has no copy takes part with None. `frozen`: also those that
    are not trained."""
    named = {} if made is None else dict(made.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or frozen:
            value = weights.whole(parameter)
            if name in named:
                named[name].copy_(value)
