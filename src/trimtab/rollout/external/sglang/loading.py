"""Weights into SGLang's model, every one of them.

SGLang's loaders pass over names that they do not know: after the first load every parameter is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trimtab.rollout.external.bare import without_adapters


def load_weights(model: Any, weights: Iterable[tuple[str, torch.Tensor]], check: bool) -> None:
    """Under the names of the checkpoint. `check`: raise where a parameter was not written."""
    with without_adapters(model):
        if check:
            for parameter in floating(model).values():
                parameter.data.fill_(float("nan"))
        model.load_weights(weights)
        left = [name for name, value in floating(model).items() if value.isnan().any()] if check else []
    if left:
        raise RuntimeError(f"SGLang did not take the weights of {', '.join(left[:5])}: {len(left)} of its parameters")


def floating(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.is_floating_point()}
