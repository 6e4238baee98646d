"""What a run of Trimtab sampled, as plain numbers, and the weights it began and ended with, by hooks that are the test's.

What the engine says its log-probs were is disturbed a little before the run sees it, as if it computed otherwise than the
trainer: so that it shows where these numbers are used and where they are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import trimtab
from trimtab.run import loop, offline
from trimtab.run.reward_model import Preferences
from trimtab.run.sft import Supervised

Weights = dict[str, torch.Tensor]
DISTURBANCE = 0.3


@dataclass
class Completion:
    """One sampled completion with all that is known of it."""

    prompt: list[int]
    tokens: list[int]
    policy_mask: list[bool]
    """Which tokens the model drew."""
    engine: list[float]
    """Log-prob of each token that the model drew."""
    used: int
    """Tokens after the row's prompt."""
    parts: dict[str, float]
    reward: float | None
    finish: str


@dataclass
class Record:
    """A whole run."""

    start: Weights = field(default_factory=dict)
    end: Weights = field(default_factory=dict)
    critic_end: Weights = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)
    """Of reinforcement learning: groups of completions. Of the others: examples or pairs."""
    kl_coefs: list[float] = field(default_factory=list)
    """After each step."""


def snapshot(model: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def record_training(patch: pytest.MonkeyPatch, **arguments: Any) -> Record:
    """Train, and keep what was sampled."""
    record, update = Record(), loop.update
    noise = torch.Generator().manual_seed(11)

    def watched(session: Any, groups: list[Any]) -> dict[str, float]:
        if not record.start:
            record.start = snapshot(session.trainer.updater.policy.model)
        for group in groups:
            for t in group.trajectories:
                t.logprobs = t.logprobs + DISTURBANCE * torch.randn(t.logprobs.shape, generator=noise)
        record.steps.append([[_completion(t, len(g.prompt.tokens)) for t in g.trajectories] for g in groups])
        metrics = update(session, groups)
        record.end = snapshot(session.trainer.updater.policy.model)
        record.critic_end = {} if session.trainer.critic is None else snapshot(session.trainer.critic.policy.model)
        record.kl_coefs.append(session.state.kl_coef)
        return metrics

    with patch.context() as patched:
        patched.setattr(loop, "update", watched)
        trimtab.train(**arguments)
    return record


def _completion(t: Any, asked: int) -> Completion:
    own = [True] * len(t.tokens) if t.policy_mask is None else t.policy_mask.tolist()
    used = len(t.prompt.tokens) + len(t.tokens) - asked
    return Completion(
        list(t.prompt.tokens), t.tokens.tolist(), own, t.logprobs.tolist(), used, dict(t.rewards), t.reward, t.finish
    )


def record_offline(patch: pytest.MonkeyPatch, kind: str, **arguments: Any) -> Record:
    """Supervised training, or that of a reward model; a step's items are those that its samples were made of."""
    record, step = Record(), offline.step
    stage: Any = Supervised if kind == "sft" else Preferences
    make, latest = stage.samples, []

    def samples(self: Any, config: Any, items: Any) -> Any:
        latest[:] = [list(items)]
        return make(self, config, items)

    def watched(run: Any) -> dict[str, float]:
        if not record.start:
            record.start = snapshot(run.trainer.updater.policy.model)
        metrics = step(run)
        record.steps += latest
        record.end = snapshot(run.trainer.updater.policy.model)
        return metrics

    with patch.context() as patched:
        patched.setattr(stage, "samples", samples)
        patched.setattr(offline, "step", watched)
        (trimtab.sft if kind == "sft" else trimtab.reward_model)(**arguments)
    return record
