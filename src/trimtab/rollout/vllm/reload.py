"""New weights in a model that vLLM already runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trimtab.rollout.outside.bare import without_adapters


def reload(worker: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """For vLLM's workers to run: take weights under the names of a checkpoint, with or without adapters around the layers."""
    model = worker.model_runner.get_model()
    if not hasattr(model, "lm_head"):  # some architectures have none where it is tied to the embedding
        weights = ((name, value) for name, value in weights if not name.startswith("lm_head."))
    with without_adapters(model):  # vLLM 0.25 finds no weights through them
        worker.reload_weights(weights_iterator=weights)
