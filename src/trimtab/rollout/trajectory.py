"""The unit that flows through Trimtab: one sampled completion with everything known about it. Nothing is padded.

A completion may be a conversation: tokens that the model drew, and tokens that an environment put between them. What was drawn is
kept as it was drawn and never tokenised again; only it has log-probs, is learned from, and counts as length.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch

from trimtab.data.prompt import Message, Prompt

Finish = Literal["stop", "length", "turns", "failed"]


@dataclass
class Conversation:
    """What happened between the model and an environment."""

    turns: list[Message] = field(default_factory=list)
    """{role, content} of everything after the row's prompt, in order. The model's have the role assistant."""
    earned: float = 0.0
    """Sum of the rewards that the environment gave."""
    counts: Counter[str] = field(default_factory=Counter)
    """Sums of what the environment counted, by name."""
    seconds: float = 0.0
    """Time of its calls in their workers."""

    @property
    def answers(self) -> list[str]:
        """What the model said, turn by turn."""
        return [turn["content"] for turn in self.turns if turn["role"] == "assistant"]


@dataclass
class Trajectory:
    """One completion. Tensors are one-dimensional, on the CPU."""

    prompt: Prompt
    """What the model read first: the row's prompt, and behind it what an environment opened with."""
    sample: int
    """Which of the group's samples this is, from 0."""
    tokens: torch.Tensor
    """int64: everything after the prompt. Ends with a token of the model's, the stop token where there was one."""
    logprobs: torch.Tensor
    """float32: log-prob of each of the model's tokens under the policy at the sampling temperature, over the whole vocabulary."""
    versions: torch.Tensor
    """int32: the policy version that sampled each of the model's tokens."""
    finish: Finish
    """stop: a stop token or string, or the environment was done. length: max_new_tokens was reached, or what the environment said
    next would have gone beyond it. turns: environment.max_turns was reached. failed: the environment failed."""
    text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)
    """Value of each reward part that applied."""
    reward: float | None = None
    """Weighted sum of the parts; None where no part applied or one failed."""
    failure: str | None = None
    """Why there is no reward, if a reward call or the environment failed."""
    failed_in: Literal["reward", "environment"] = "reward"
    """Where, if it did."""
    advantage: float | None = None
    """Mean over its tokens, once it is known; None where there is no reward."""
    policy_mask: torch.Tensor | None = None
    """bool, one entry a token: which ones the model drew. None: all."""
    conversation: Conversation | None = None
    """With an environment."""
    routes: torch.Tensor | None = None
    """int16, [tokens, layers, experts of a token]: experts that the engine chose where it read each token, -1 where that is not
    known, as of the last. None: not kept (`learn.router_replay`)."""

    def __len__(self) -> int:
        """Tokens that the model drew."""
        return self.tokens.shape[0] if self.policy_mask is None else int(self.policy_mask.sum())


@dataclass
class Group:
    """All samples of one prompt in one step, in sample order."""

    prompt: Prompt
    trajectories: list[Trajectory]
    index: int = 0
    """Which of the call's requests this answers; groups finish in any order."""
