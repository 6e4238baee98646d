"""Models as other tools load them: RUN/final, whole or as it was before."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from trimtab.base.files import aside_of, put_in_place
from trimtab.model.adapters import has_adapters, merged_state, save_adapters
from trimtab.model.load import save_model
from trimtab.model.policy import Policy
from trimtab.record.folder import FINAL
from trimtab.update.guard import Guard

REWARD = "reward.json"


def export_model(policy: Policy, tokenizer: Any, guard: Guard, folder: Path) -> None:
    """The model, and adapters beside it where there are some."""
    aside = aside_of(folder / FINAL)
    guard.run("export", lambda: save_model(policy.model, tokenizer, aside))
    if has_adapters(policy.model):
        save_adapters(policy.model, aside / "adapter")
    put_in_place(aside, folder / FINAL)


def export_classifier(
    policy: Policy, head: torch.nn.Linear, tokenizer: Any, guard: Guard, folder: Path, facts: Mapping[str, Any]
) -> None:
    """A model of scores as transformers' sequence classification with one label, and beside it reward.json. `facts` has the mean
    and the standard deviation of its scores, which are 0 and 1 when `shift` is added to what it then gives."""
    aside, mean, std = aside_of(folder / FINAL), facts["mean"], facts["std"]
    guard.run("export", lambda: save_classifier(policy, head.weight / std, tokenizer, aside))
    if has_adapters(policy.model):
        save_adapters(policy.model, aside / "adapter")
    shift = (float(head.bias.detach()) - mean) / std
    written = {"mean": mean, "std": std, "shift": shift, **facts}
    (aside / REWARD).write_text(json.dumps(written, indent=2) + "\n")
    put_in_place(aside, folder / FINAL)


@torch.no_grad()
def save_classifier(policy: Policy, weight: torch.Tensor, tokenizer: Any, folder: Path) -> None:
    """The model's body with `weight` [1, E] as its one label, as transformers' sequence classification."""
    model = policy.model
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    state = merged_state(model) if has_adapters(model) else {k: v.cpu() for k, v in model.state_dict().items()}
    made = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    state = {name: value for name, value in state.items() if name in made.state_dict()} | {"score.weight": weight.cpu()}
    missing = made.load_state_dict(
        {name: value.to(policy.dtype) for name, value in state.items()}, strict=False
    ).missing_keys
    assert not missing, f"{type(made).__name__} has weights that {policy.name} has not: {missing}"
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
