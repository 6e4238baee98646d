"""PPO's critic: a model of its own with one number a token, trained by the same packed update under the same cap.

The value of token t is read from the hidden state that predicts it, so it has seen everything before the token and not the token
itself. Past the end of a sequence values are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.known import ResolvedLearn
from trimtab.model.policy import Policy
from trimtab.record.checkpoint import has_part, load_optimizer
from trimtab.record.part import Stateful
from trimtab.update.objectives.values import Values
from trimtab.update.updater import Updater

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


def open_critic(policy: Policy, learn: ResolvedLearn, **settings: Any) -> Updater:
    """The updater of a value model, with a new head."""
    return Updater(policy, Values(add_value_head(policy), learn.critic.clip), learn, follows_routes=False, **settings)


def critic_files(critic: Updater) -> dict[str, Mapping[str, torch.Tensor] | Stateful]:
    """What a checkpoint keeps of a critic, by file: what is trained of it, and its optimizer's state."""
    trained = {name: p for name, p in critic.policy.model.named_parameters() if p.requires_grad}
    return {CRITIC: trained, CRITIC_OPTIMIZER: critic.optimizer}


@torch.no_grad()
def restore_critic(checkpoint: Path, critic: Updater, load: Load = load_file) -> None:
    """Make the critic what it was when the checkpoint was written. `load` reads its weights."""
    if not has_part(checkpoint, CRITIC):
        raise ConfigError(
            [
                Problem(
                    "learn.algorithm",
                    f"{checkpoint.name} has no critic to resume",
                    "Write the algorithm it was trained with.",
                )
            ]
        )
    saved = load(checkpoint / CRITIC)
    for name, parameter in critic.policy.model.named_parameters():
        if parameter.requires_grad:
            critic.policy.load_parameter(name, saved[name])
    load_optimizer(checkpoint, critic.optimizer, CRITIC_OPTIMIZER)
