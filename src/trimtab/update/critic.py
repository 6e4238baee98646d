"""PPO's critic: a model of its own with one number a token, trained by the same packed update under the same cap.

The value of token t is read from the hidden state that predicts it, so it has seen everything before the token and not the token
itself. Past the end of a sequence values are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.known import ResolvedLearn
from trimtab.learn.values import value_loss
from trimtab.model.packed import take_rows
from trimtab.model.policy import AnyPolicy, Policy
from trimtab.record.checkpoint import Stateful, load_optimizer
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.updater import Progress, Updater, UpdateStats

Load = Callable[[Path], dict[str, torch.Tensor]]
CRITIC, CRITIC_OPTIMIZER = "critic.safetensors", "critic_optimizer.safetensors"


def add_value_head(policy: Policy) -> torch.nn.Linear:
    """One number from a hidden state, in float32 (or the model's own type where that is wider); 0 until it has learned."""
    dtype = torch.promote_types(policy.dtype, torch.float32)
    head = torch.nn.Linear(policy.config.hidden_size, 1, dtype=dtype, device=policy.device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    policy.model.value_head = head
    output = policy.model.get_output_embeddings()
    if output is not None and output.weight is not policy.model.get_input_embeddings().weight:
        output.requires_grad_(False)  # nothing is read from it
    policy.lay_out_weights()
    return head


class Critic(Updater):
    """Values of samples, and their improvement."""

    def __init__(self, policy: Policy, learn: ResolvedLearn, **settings: Any) -> None:
        """Like an Updater, except that there are no log-probs to chunk."""
        self.head = add_value_head(policy)
        super().__init__(policy, learn, **settings | {"logprob_chunk": 1})

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], policy: AnyPolicy, field: str) -> None:
        """Write the values of the samples' tokens into one of their fields."""
        self.progress = Progress()
        batches = self._micro_batches(samples, self.score_token_budget)
        found = [(batch, self._values(batch)) for batch in batches]
        for batch, values_R in found:
            batch.scatter(values_R, field)

    def _values(self, batch: MicroBatch) -> torch.Tensor:
        hidden_TE = self.policy.hidden(batch.tokens_T, batch.plan.positions, batch.plan)
        rows_RE = take_rows(hidden_TE, batch.predictors_R)
        values: torch.Tensor = self.head(rows_RE.to(self.head.weight.dtype)).squeeze(-1)
        return values

    def _loss(self, batch: MicroBatch, kl_coef: float, stats: UpdateStats) -> torch.Tensor:
        values = self._values(batch)
        found = value_loss(values, batch.gather("values"), batch.gather("returns"), self.learn.critic.clip)
        weighted = batch.gather("weights") * found.loss
        stats.tokens += values.shape[0]
        stats.add(loss=weighted, clipped=found.clipped, values=values)
        return weighted.sum()


def critic_files(critic: Critic) -> dict[str, dict[str, torch.Tensor] | Stateful]:
    """What a checkpoint keeps of a critic, by file: what is trained of it, and its optimizer's state."""
    trained = {name: p.detach() for name, p in critic.policy.model.named_parameters() if p.requires_grad}
    return {CRITIC: trained, CRITIC_OPTIMIZER: critic.optimizer}


@torch.no_grad()
def restore_critic(checkpoint: Path, critic: Critic, load: Load = load_file) -> None:
    """Make the critic what it was when the checkpoint was written. `load` reads its weights."""
    if not (checkpoint / CRITIC).is_file():
        raise ConfigError(
            [Problem("learn.algorithm", f"{checkpoint.name} has no critic to go on with", "Write it as it was.")]
        )
    saved = load(checkpoint / CRITIC)
    for name, parameter in critic.policy.model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(saved[name])
    load_optimizer(checkpoint, critic.optimizer, CRITIC_OPTIMIZER)
