"""Trimtab's sampling inside SGLang (external/drawing.py): a sampler of its own, registered under a name.

SGLang hands a sampler the logits of a batch and no requests. Who drives the scheduler says whose they are before each step:
without overlap a step's batch is known, and all tokens before it are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler

from trimtab.rollout.external.drawing import KeyedSampler
from trimtab.rollout.external.sglang.rows import draw_batch


class DrawingSampler(Sampler):
    """See external/drawing.py."""

    def __init__(self, keyed: KeyedSampler) -> None:
        super().__init__()
        self.keyed = keyed
        self.keys: Mapping[str, int] = {}
        """Keys of the random numbers, by the name of a request."""
        self.requests: Sequence[Any] = ()
        """Requests of the step that is computed, one for each row."""

    def forward(self, logits_output: Any, *_: Any) -> torch.Tensor:
        return draw_batch(self.keyed, logits_output.next_token_logits, self.requests, self.keys)
