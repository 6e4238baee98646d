"""Whether a library computes the model as the trainer does. Nothing that one draws which does not is learned from."""

from __future__ import annotations

import torch

from trimtab.base.errors import EngineError
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import TOLERANCE_NATS, Policy
from trimtab.rollout.engine import Request, Sampler
from trimtab.rollout.trajectory import Trajectory

PROMPTS, SAMPLES, TOKENS = 3, 2, 12


def refuse_other_logprobs(sampler: Sampler, policy: Policy, context: int, library: str) -> None:
    """Draw a few sequences and compare their log-probs with the trainer's: a library may compute a model in another way, or not
    take all of its weights. `context`: tokens of the longest sequence; `library`: its name and version."""
    numbers, vocab_size = torch.Generator().manual_seed(1), int(policy.config.vocab_size)
    length, new = lengths(getattr(policy.config, "sliding_window", None), context)
    rows = torch.randint(0, vocab_size, (PROMPTS, length), generator=numbers).tolist()
    requests = [Request(Prompt(i, "", row), SAMPLES, new, Sampling(), seed=1, step=0) for i, row in enumerate(rows)]
    found = [trajectory for group in sampler.generate(requests) for trajectory in group.trajectories]
    gap = float(torch.cat([(t.logprobs - trainer_logprobs(policy, t)).abs() for t in found]).mean())
    if not gap <= TOLERANCE_NATS[policy.dtype]:
        raise EngineError(
            f"{library} and the trainer compute different log-probs for {policy.name}: {gap:.2g} nats a token apart. The library "
            "computes this model differently, or did not load all of its weights. Write run.engine: native."
        )


def lengths(window: int | None, context: int) -> tuple[int, int]:
    """Tokens of a prompt and after it that show how a library computes a model. Where attention has a window that sequences of a
    run grow out of, they go well beyond it: some libraries have none."""
    new = min(TOKENS, -(-context // 2))
    enough = 2 * window if window is not None and window < context else 0
    return max(1, min(max(TOKENS, enough), context - new)), new


def pass_with_the_others(policy: Policy, context: int) -> None:
    """The passes that the comparison takes, of a rank that has no engine: where ranks hold weights in parts, all run the same
    number of passes."""
    prompt = Prompt(0, "", [0] * lengths(getattr(policy.config, "sliding_window", None), context)[0])
    zero = torch.zeros(1, dtype=torch.int64)
    nothing = Trajectory(prompt, 0, zero, zero.float(), zero.int(), "length")
    for _ in range(PROMPTS * SAMPLES):
        trainer_logprobs(policy, nothing)


@torch.no_grad()
def trainer_logprobs(policy: Policy, trajectory: Trajectory) -> torch.Tensor:
    """The trainer's own log-probs of the tokens that were drawn."""
    device, first = policy.device, len(trajectory.prompt.tokens)
    tokens = torch.tensor([*trajectory.prompt.tokens, *trajectory.tokens.tolist()], device=device)
    plan = PackedPlan([len(tokens) - 1], device)
    with policy.present():
        hidden_TE = policy.hidden(tokens[:-1], plan.positions, plan)[first - 1 :].contiguous()
        return policy.head.token_stats(hidden_TE, tokens[first:], 1.0, len(tokens)).logprobs.float().cpu()
