"""Which settings are replayed: a cover in which every option occurs, and every algorithm with every option it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from replica.settings import RECIPES

Settings = dict[str, Any]


@dataclass
class Case:
    """Settings of a run, under a name."""

    name: str
    learn: Settings
    parts: list[Settings] = field(default_factory=list)
    """Reward parts that are not just summed."""
    lora: Settings | None = None
    tolerance: float = 1e-4
    """Of the length of the way that the weights went. Trimtab's advantages and shares are float32, all else is float64."""

    @property
    def shows(self) -> list[str]:
        """Settings that must make a difference to how the run ends."""
        return [name for name, value in self.learn.items() if name != "algorithm" and value != {}]


AGAIN = {"updates_per_step": 2, "epochs_per_step": 2}
PARTS = [
    {"name": "few", "weight": 1.0, "normalize": "group"},
    {"name": "brief", "weight": 0.5, "normalize": "step"},
]

COVER = [
    Case("grpo", {"optimizer": {}}),
    Case(
        "grpo, off policy",
        {
            **AGAIN,
            "clip": {"low": 0.1, "high": 0.3, "dual": 1.2},
            "schedule": {"kind": "linear", "warmup_steps": 3, "final": 0.2, "unit": "update"},
            "optimizer": {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3},
            "max_grad_norm": 0.1,
        },
    ),
    Case(
        "dr_grpo",
        {
            "algorithm": "dr_grpo",
            "kl": {"coef": 0.3, "estimator": "k2"},
            "entropy_coef": 0.05,
            "sampling": {"temperature": 0.8},
            "overlong": {"buffer": 5, "penalty": 0.7},
        },
    ),
    Case("dapo", {"algorithm": "dapo", **AGAIN, "mask_truncated": True, "kl": {"coef": 0.3, "corrected": True}}),
    Case("dapo, no dynamic sampling", {"algorithm": "dapo", "dynamic_sampling": {"enabled": False}}),
    Case(
        "gspo",
        {
            "algorithm": "gspo",
            **AGAIN,
            "kl": {"coef": 0.3, "corrected": "sequence"},
            "importance": {"level": "sequence", "cap": 1.1},
        },
    ),
    Case("cispo", {"algorithm": "cispo", **AGAIN, "clip": {"high": 0.05}, "old_logprobs": "engine"}),
    Case(
        "rloo",
        {
            "algorithm": "rloo",
            **AGAIN,
            "kl": {"coef": 0.3, "estimator": "k1", "where": "reward"},
            "reward_clip": (0.5, 1.5),
            "max_grad_norm": None,
        },
    ),
    Case(
        "rloo as others have it",
        {
            "algorithm": "rloo",
            "loss": "clip",
            "aggregate": "token_mean",
            **AGAIN,
            "kl": {"coef": 0.3, "estimator": "k1", "where": "advantage"},
        },
    ),
    Case(
        "reinforce",
        {
            "algorithm": "reinforce",
            "importance": {"level": "token", "cap": 1.2, "mode": "mask"},
            "schedule": {"kind": "cosine", "final": 0.1},
        },
    ),
    Case(
        "reinforce_pp",
        {
            "algorithm": "reinforce_pp",
            "updates_per_step": 2,
            "kl": {"coef": 0.3, "estimator": "k1", "where": "reward", "target": 0.01, "horizon": 32},
        },
    ),
    Case(
        "reinforce_pp_baseline",
        {
            "algorithm": "reinforce_pp_baseline",
            "epochs_per_step": 2,
            "kl": {"coef": 0.3, "estimator": "k2", "where": "advantage"},
        },
        parts=PARTS,
    ),
    Case(
        "ppo",
        {
            "algorithm": "ppo",
            **AGAIN,
            "critic": {"lr": 2e-2, "clip": 0.1, "warmup_steps": 1, "gamma": 0.9, "lam": 0.8},
            "kl": {"coef": 0.3, "estimator": "k3", "where": "reward"},
        },
    ),
    Case("adapters", {"epochs_per_step": 2, "kl": {"coef": 0.3}}, lora={"r": 2}),
    Case("moments of 8 bits", {"optimizer": {"states": "8bit"}}, tolerance=0.05),
]  # fmt: skip

ON_POLICY: dict[str, Settings] = {
    "plain": {},
    "kl in the loss, k2": {"kl": {"coef": 0.3, "estimator": "k2"}},
    "kl in the loss, k3": {"kl": {"coef": 0.3}},
    "kl in the loss, k1 corrected": {"kl": {"coef": 0.3, "estimator": "k1", "corrected": True}},
    "kl in the reward, k1": {"kl": {"coef": 0.3, "estimator": "k1", "where": "reward"}},
    "kl in the advantage, k3": {"kl": {"coef": 0.3, "where": "advantage"}},
    "kl towards a target": {"kl": {"coef": 0.3, "target": 0.01, "horizon": 32}},
    "importance of tokens, truncated": {"importance": {"level": "token", "cap": 1.1}},
    "importance of sequences, masked": {"importance": {"level": "sequence", "cap": 1.2, "mode": "mask"}},
    "entropy": {"entropy_coef": 0.05},
    "cosine": {"schedule": {"kind": "cosine", "warmup_steps": 1}},
    "decay": {"optimizer": {"weight_decay": 0.3, "beta1": 0.8}},
    "no clipping of gradients": {"max_grad_norm": None},
    "rewards clipped": {"reward_clip": (0.5, 1.5)},
    "overlong": {"overlong": {"buffer": 5}},
    "truncated left out": {"mask_truncated": True},
    "temperature": {"sampling": {"temperature": 0.8}},
    **{f"aggregate {name}": {"aggregate": name} for name in ("token_mean", "sequence_mean", "sequence_sum", "constant")},
}  # fmt: skip
OFF_POLICY: dict[str, Settings] = {
    "two updates": {"updates_per_step": 2},
    "two epochs": {"epochs_per_step": 2},
    "more updates than groups of a part": {"updates_per_step": 3, "epochs_per_step": 2},
    "the engine's log-probs": {**AGAIN, "old_logprobs": "engine"},
    "tight clip": {**AGAIN, "clip": {"low": 0.02, "high": 0.03}},
    "rates by update": {**AGAIN, "schedule": {"kind": "linear", "warmup_steps": 2, "unit": "update"}},
    "rates by step": {**AGAIN, "schedule": {"kind": "linear", "warmup_steps": 1, "final": 0.3}},
    "kl in the loss, k3 corrected": {**AGAIN, "kl": {"coef": 0.3, "corrected": True}},
    "kl in the loss, k2 corrected by sequence": {**AGAIN, "kl": {"coef": 0.3, "estimator": "k2", "corrected": "sequence"}},
    "kl in the reward, k3, off policy": {**AGAIN, "kl": {"coef": 0.3, "where": "reward"}},
    "importance of tokens, off policy": {**AGAIN, "importance": {"level": "token", "cap": 1.2, "mode": "mask"}},
}  # fmt: skip
ADVANTAGES = [
    "group_std", "group_mean", "leave_one_out", "batch_mean", "global_norm", "group_mean_global_norm", "group_mean_global_std",
    "group_mean_batch_std",
]  # fmt: skip
LOSSES = ["clip", "sequence_clip", "gspo", "cispo"]


def _full() -> list[Case]:
    found = []
    for algorithm, recipe in RECIPES.items():
        options = dict(ON_POLICY)
        if recipe["loss"] != "on_policy":
            options |= OFF_POLICY
        if recipe["loss"] == "clip":
            options["dual clip"] = {**AGAIN, "clip": {"dual": 1.05}}
        if recipe["advantage"] in ("gae", "global_norm"):
            del options["kl in the advantage, k3"]
        elif recipe["advantage"] != "batch_mean":
            options["dynamic sampling"] = {"dynamic_sampling": {"enabled": True}}
        critic = {"critic": {"lr": 1e-2}} if algorithm == "ppo" else {}
        found += [
            Case(f"{algorithm}: {name}", {"algorithm": algorithm, **critic, **extra}) for name, extra in options.items()
        ]
        found.append(Case(f"{algorithm}: parts", {"algorithm": algorithm, **critic}, parts=PARTS))
        if algorithm != "ppo":
            found.append(Case(f"{algorithm}: adapters", {"algorithm": algorithm}, lora={"r": 3, "alpha": 5}))
    found += [Case(f"advantage {name}", {"advantage": name}) for name in ADVANTAGES]
    found += [
        Case(
            f"{algorithm} with the loss {loss}",
            {"algorithm": algorithm, "loss": loss, **AGAIN, "clip": {"low": 0.05, "high": 0.1}},
        )
        for algorithm in ("grpo", "reinforce_pp_baseline")
        for loss in LOSSES
    ]
    found += [
        Case("critic without a bound", {"algorithm": "ppo", **AGAIN, "critic": {"lr": 2e-2, "clip": None}}),
        Case("critic that discounts", {"algorithm": "ppo", **AGAIN, "critic": {"lr": 2e-2, "gamma": 0.7, "lam": 0.5}}),
    ]
    return found


FULL = _full()

SFT: dict[str, Settings] = {
    "tokens": {},
    "sequences": {
        "aggregate": "sequence_mean",
        "schedule": {"kind": "linear", "warmup_steps": 1},
        "optimizer": {"weight_decay": 0.3},
    },
    "all tokens": {"loss_on": "all", "max_grad_norm": None},
}
REWARD_MODELS: dict[str, Settings] = {"plain": {}, "centred": {"center": 0.1, "max_grad_norm": 0.2}}
