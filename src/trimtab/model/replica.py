"""Whole copies of a model that ranks hold in parts: the engine's own (rollout), and one on the host to export.

`skeleton_of` is taken before the model is cut; `empty_copy` makes a model of it with memory for weights and no values; `fill`
gathers one parameter after the other into such a copy. All ranks call `fill`, also those that have no copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from trimtab.model.weights import WeightStore

NO_SHAPES: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class PartOfWeight(Protocol):
    """What a copy has of a weight (slices.py)."""

    def fill(self, own: torch.Tensor, whole: torch.Tensor) -> None: ...


WHOLE: Mapping[str, PartOfWeight] = MappingProxyType({})


def skeleton_of(model: Any) -> Any:
    """The model without weights: its parameters are on the meta device. Tied ones stay tied."""
    return with_parameters(model, torch.device("meta"))


def empty_copy(skeleton: Any, device: torch.device) -> Any:
    """A model like the skeleton whose weights are on a device and undefined."""
    made = with_parameters(skeleton, device)
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return made


def with_parameters(model: Any, device: torch.device, shapes: Mapping[int, tuple[int, ...]] = NO_SHAPES) -> Any:
    """A copy of a model with parameters of undefined values. `shapes`: by id of those that have another one in it."""
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(
            torch.empty(shapes.get(id(p), tuple(p.shape)), dtype=p.dtype, device=device), requires_grad=p.requires_grad
        )
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


@torch.no_grad()
def fill(
    made: Any | None, model: Any, weights: WeightStore, frozen: bool = True, taken: Mapping[str, PartOfWeight] = WHOLE
) -> None:
    """Make a copy's weights the model's. A collective: a rank that has no copy takes part with None. `frozen`: also those that
    are not trained. `taken`: by name, what the copy has of weights that it has in part."""
    named = {} if made is None else dict(made.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or frozen:
            value = weights.whole(parameter)
            if name in taken and name in named:
                taken[name].fill(named[name].data, value)
            elif name in named:
                named[name].copy_(value)
