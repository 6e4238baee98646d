"""New weights in a model that vLLM already runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


def reload(worker: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """For vLLM's workers to run: take weights under the names of a checkpoint, with or without adapters around the layers."""
    model = worker.model_runner.get_model()
    if not hasattr(model, "lm_head"):  # some architectures have none where it is tied to the embedding
        weights = ((name, value) for name, value in weights if not name.startswith("lm_head."))
    with _bare(model):
        worker.reload_weights(weights_iterator=weights)


@contextlib.contextmanager
def _bare(model: torch.nn.Module) -> Iterator[None]:
    """Layers without what holds adapters around them, which vLLM 0.25 finds no weights through."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
