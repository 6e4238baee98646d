"""What vLLM's workers do for the core: one worker in its process, or one for each device that the model is cut over, in processes
of their own. Each draws the same tokens from the same logits; each takes its part of the weights."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.config.learn import Sampling
from trimtab.rollout.external.bare import without_adapters
from trimtab.rollout.external.messages import Weights
from trimtab.rollout.external.reading import Reader
from trimtab.rollout.external.vllm.drawing import DrawingProcessor

READER = Reader()
"""A worker's process has one engine."""


def see(_: Any, weights: Weights) -> None:
    """Where weights lie from now on; `NotShared` where this worker cannot see them."""
    READER.take(weights)


def reload(worker: Any) -> None:
    """Take the weights that were last seen, under the names of a checkpoint, with or without adapters around the layers."""
    model = worker.model_runner.get_model()
    weights = READER.read()
    if not hasattr(model, "lm_head"):  # some architectures have none where it is tied to the embedding
        weights = ((name, value) for name, value in weights if not name.startswith("lm_head."))
    with without_adapters(model):  # vLLM 0.25 finds no weights through them
        worker.reload_weights(weights_iterator=weights)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the trainer may write its weights again


def sample_as(_: Any, sampling: dict[str, Any]) -> None:
    DrawingProcessor.current.keyed.sampling = Sampling.model_validate(sampling)


def made(worker: Any, ids: list[int]) -> list[list[int]]:
    """Tokens that requests have so far; of the first worker alone, which all are like."""
    return [list(DrawingProcessor.current.made.get(id, [])) for id in ids] if worker.rank == 0 else []


def take(worker: Any, ids: list[int], counts: list[int]) -> list[torch.Tensor]:
    """Log-probs of requests that ended, on the CPU; of the first worker alone, and each in memory of its own: pickled, a view
    brings all of the others along."""
    found = DrawingProcessor.current.take(ids, counts)
    return [values.clone() for values in found] if worker.rank == 0 else []


def forget(_: Any, ids: list[int]) -> None:
    DrawingProcessor.current.forget(ids)
