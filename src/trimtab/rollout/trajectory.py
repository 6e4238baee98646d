"""The unit that flows through Trimtab: one sampled completion with everything known about it. Nothing is padded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from trimtab.data.prompt import Prompt

Finish = Literal["stop", "length"]


@dataclass
class Trajectory:
    """One completion. Tensors are one-dimensional, on the CPU, one entry a completion token."""

    prompt: Prompt
    sample: int
    """Which of the group's samples this is, from 0."""
    tokens: torch.Tensor
    """int64. Ends with the stop token where there was one."""
    logprobs: torch.Tensor
    """float32: log-prob of each token under the policy at the sampling temperature, over the whole vocabulary."""
    versions: torch.Tensor
    """int32: the policy version that sampled each token."""
    finish: Finish
    """stop: a stop token or string. length: max_new_tokens was reached."""
    text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    """Value of each reward part that applied."""
    reward: float | None = None
    """Weighted sum of the parts; None where no part applied or one failed."""
    failure: str | None = None
    """Why there is no reward, if a reward call failed."""

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass
class Group:
    """All samples of one prompt in one step, in sample order."""

    prompt: Prompt
    trajectories: list[Trajectory]
    index: int = 0
    """Which of the call's requests this answers; groups finish in any order."""
