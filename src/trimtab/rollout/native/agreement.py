"""Whether steps of decoding compute what a packed forward pass does, where layers carry a state: a step has kernels of its own.

Compared when an engine is made, on the real weights: prompts in chunks, forks, steps. Nothing that an engine draws which computes
otherwise is learned from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from trimtab.base.errors import EngineError
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import TOLERANCE_NATS, Policy
from trimtab.rollout.engine import Request
from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.trajectory import Group, Trajectory

LENGTHS, SAMPLES, TOKENS, CHUNK = (9, 6), 2, 4, 8
"""Chunks of so many tokens: the first prompt takes two, and both are forked together."""


class Compared(Protocol):
    """What is asked of an engine here."""

    policy: Policy
    pool: PagePool
    prefill_tokens: int
    _kv_dtype: Any

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]: ...


def refuse_other_steps(engine: Compared) -> None:
    """Draw a few short sequences and compare their log-probs with the trainer's."""
    policy, whole = engine.policy, engine.prefill_tokens
    room = min(policy.context_tokens, (engine.pool.total - 1) * engine.pool.page_tokens) - TOKENS
    if room < 1:
        return
    numbers = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, policy.config.vocab_size, (min(n, room),), generator=numbers).tolist() for n in LENGTHS]
    requests = [Request(Prompt(i, "", row), SAMPLES, TOKENS, Sampling(), seed=2, step=0) for i, row in enumerate(rows)]
    engine.prefill_tokens = min(CHUNK, whole)
    try:
        drawn = [trajectory for group in engine.generate(requests) for trajectory in group.trajectories]
    finally:
        engine.prefill_tokens = whole
    gap = max(_gap(policy, trajectory) for trajectory in drawn)
    exact = engine._kv_dtype == "auto"  # else keys and values are rounded further
    if gap > TOLERANCE_NATS[policy.dtype if exact else torch.bfloat16]:
        raise EngineError(
            f"run.engine: steps of decoding and the forward pass compute different log-probs for {policy.name}: {gap:.2g} nats "
            "apart. A kernel for its layers that carry a state is wrong. Uninstall flash-linear-attention, causal-conv1d or "
            "mamba-ssm, or install a version that suits this transformers"
        )


@torch.no_grad()
def _gap(policy: Policy, trajectory: Trajectory) -> float:
    """How far a trajectory's log-probs are from those of a forward pass over all of it, on average."""
    prompt = trajectory.prompt.tokens
    tokens = torch.tensor([*prompt, *trajectory.tokens.tolist()], device=policy.device)
    plan = PackedPlan([tokens.shape[0]], policy.device)
    hidden = policy.hidden(tokens, plan.positions, plan)[len(prompt) - 1 : -1]
    whole = policy.head.logits(hidden).float().log_softmax(-1).cpu()
    expected = whole.gather(1, trajectory.tokens[:, None].long())[:, 0]
    return float((trajectory.logprobs - expected).abs().mean())
