"""What every library's core keeps of itself and of the call that runs, in the words that a trainer understands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trimtab.config.learn import Sampling
from trimtab.rollout.external.messages import Beat, Done, Ready
from trimtab.rollout.stops import StopStrings


@dataclass
class Account:
    """What one engine is and has done."""

    version: str
    blocks: int
    """Blocks of its KV cache."""
    call: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    fullest: float = 0.0
    """Share of the KV cache in use, at most."""

    @property
    def ready(self) -> Ready:
        return Ready(self.version, self.blocks)

    @property
    def beat(self) -> Beat:
        used = round(self.fullest * self.blocks)
        return Beat(self.call, self.steps, self.prefill_tokens, self.cached_tokens, used)

    def begin(self, call: int) -> None:
        """Count anew, unless it is the same call that goes on."""
        if call != self.call:
            self.call, self.fullest = call, 0.0
            self.steps = self.prefill_tokens = self.cached_tokens = 0

    def step(self, used: float) -> None:
        self.steps += 1
        self.fullest = max(self.fullest, used)

    def prompt(self, tokens: int, cached: int) -> None:
        """Count the prompt of a sequence that has ended."""
        self.cached_tokens += cached
        self.prefill_tokens += tokens - cached

    def done(self, id: int, tokens: list[int], logprobs: torch.Tensor, stopped: bool) -> Done:
        values = logprobs.contiguous().numpy().tobytes()
        return Done(self.call, id, torch.tensor(tokens).numpy().tobytes(), values, stopped)


def stop_strings(sampling: Sampling, folder: str) -> StopStrings:
    """Those of a call, with the tokenizer that lies in the model's folder where there are any."""
    return StopStrings(sampling.stop, _tokenizer(folder) if sampling.stop else None)


@cache
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(folder))
