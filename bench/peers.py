"""What both comparisons with TRL have in common, so that the two sides of each differ in nothing that changes the result."""

from __future__ import annotations

from typing import Any

ADAMW = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def trl_settings(work: dict[str, Any], steps: int) -> dict[str, Any]:
    """GRPO as Trimtab's defaults have it, in the words of TRL's GRPOConfig, and nothing written but the result."""
    return {
        "max_steps": steps,
        "num_generations": work["samples_per_prompt"],
        "max_completion_length": work["max_new_tokens"],
        "loss_type": "grpo",
        "scale_rewards": "group",
        "beta": 0.0,
        "temperature": 1.0,
        "learning_rate": work["lr"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_grad_norm": 1.0,
        "adam_beta1": ADAMW["beta1"],
        "adam_beta2": ADAMW["beta2"],
        "adam_epsilon": ADAMW["eps"],
        "weight_decay": ADAMW["weight_decay"],
        "optim": "adamw_torch_fused",
        "shuffle_dataset": False,
        "disable_dropout": True,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
