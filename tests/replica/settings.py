"""What each algorithm stands for and what is assumed where a setting is left out: written down again, from the papers."""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "group_std", "loss": "clip", "aggregate": "sequence_mean"},
    "dr_grpo": {"advantage": "group_mean", "loss": "clip", "aggregate": "constant"},
    "dapo": {"advantage": "group_std", "loss": "clip", "aggregate": "token_mean", "high": 0.28, "dynamic": True},
    "gspo": {"advantage": "group_std", "loss": "gspo", "aggregate": "sequence_mean", "low": 3e-4, "high": 4e-4},
    "cispo": {"advantage": "group_std", "loss": "cispo", "aggregate": "token_mean", "low": 1.0, "high": 5.0},
    "rloo": {"advantage": "leave_one_out", "loss": "sequence_clip", "aggregate": "sequence_sum"},
    "reinforce": {"advantage": "batch_mean", "loss": "on_policy", "aggregate": "token_mean"},
    "reinforce_pp": {"advantage": "global_norm", "loss": "clip", "aggregate": "token_mean"},
    "reinforce_pp_baseline": {"advantage": "group_mean_global_norm", "loss": "clip", "aggregate": "token_mean"},
    "ppo": {"advantage": "gae", "loss": "clip", "aggregate": "token_mean"},
}
DEFAULTS: dict[str, Any] = {
    "updates_per_step": 1,
    "epochs_per_step": 1,
    "schedule": {"kind": "constant", "warmup_steps": 0, "final": 0.0, "unit": "step"},
    "optimizer": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "max_grad_norm": 1.0,
    "sampling": {"temperature": 1.0},
    "clip": {"dual": None},
    "kl": {"coef": 0.0, "estimator": "k3", "where": "loss", "corrected": False, "target": None, "horizon": 10_000},
    "entropy_coef": 0.0,
    "old_logprobs": "trainer",
    "importance": {"level": "off", "cap": 2.0, "mode": "truncate"},
    "critic": {"lr": 1e-5, "clip": 0.2, "warmup_steps": 0, "gamma": 1.0, "lam": 0.95},
    "reward_clip": None,
    "overlong": None,
    "mask_truncated": False,
}


def complete(learn: dict[str, Any]) -> dict[str, Any]:
    """Every setting of a run, given those that were written."""
    recipe = {"low": 0.2, "high": 0.2, "dynamic": False} | RECIPES[learn.get("algorithm", "grpo")]
    found = dict(DEFAULTS)
    for name, value in learn.items():
        found[name] = {**found[name], **value} if isinstance(found.get(name), dict) else value
    found["clip"] = {"low": recipe["low"], "high": recipe["high"], **found["clip"]}
    found["dynamic"] = learn.get("dynamic_sampling", {}).get("enabled", recipe["dynamic"])
    for name in ("advantage", "loss", "aggregate"):
        found[name] = learn.get(name, recipe[name])
    return found
