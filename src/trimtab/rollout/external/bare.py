"""A library's model as it was before it got room for adapters. Needs nothing but torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Layers themselves in place of what holds adapters around them, under which their weights have other names."""
    wrapped = [(name, module) for name, module in model.named_modules() if hasattr(module, "base_layer")]
    try:
        for name, module in wrapped:
            _put(model, name, module.base_layer)
        yield
    finally:
        for name, module in wrapped:
            _put(model, name, module)


def _put(model: torch.nn.Module, name: str, module: Any) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
