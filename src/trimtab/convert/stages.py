"""What a command or a class of a framework trains, and the table that converts it.

Guarantees that no training becomes another: a program that has no counterpart here is refused with what to do instead, a
name that is not known is refused with a near one, and settings of two trainings are not mixed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.suggestions import nearest
from trimtab.convert.rules import MIN_NAME_SIMILARITY
from trimtab.convert.settings import Setting

PAIRS = (
    "Train a reward model on the same pairs (trimtab reward-model), then name it as the reward of trimtab train with grpo or "
    'rloo: reward: [{fn: "model:RUN/final"}]'
)
LABELS = (
    "Write a reward function for trimtab train; or make pairs of good and bad answers to one prompt, and train a reward model on "
    "them: trimtab reward-model"
)
TEACHER = "Write the teacher's answers into a file and learn them with trimtab sft"
STEPS = "Score whole answers instead: trimtab reward-model, or a reward function of your own"
SFT = "Write a config for trimtab sft: docs/sft.md has one of four lines"
REWARD_MODEL = "Write a config for trimtab reward-model: docs/reward-models.md has one of four lines"

STAGES: dict[str, dict[str, str]] = {
    "trl": {
        **dict.fromkeys(("grpo", "GRPOConfig", "GRPOTrainer"), "trl"),
        **dict.fromkeys(("rloo", "RLOOConfig", "RLOOTrainer"), "trl-rloo"),
        **dict.fromkeys(("ppo", "PPOConfig", "PPOTrainer"), "trl-ppo"),
        **dict.fromkeys(("sft", "SFTConfig", "SFTTrainer"), "trl-sft"),
        **dict.fromkeys(("reward", "reward_modeling", "RewardConfig", "RewardTrainer"), "trl-reward"),
    },
    "openrlhf": {"train_ppo_ray": "openrlhf", "train_ppo": "openrlhf"},
    "verl": {"main_ppo": "verl"},
    "nanochat": {"chat_rl": "nanochat"},
}
"""By framework: its programs and classes, and the kind of settings that each has."""

_PAIRS = ("learning from pairs without a reward model is not supported", PAIRS)
_LABELS = ("learning from single answers marked good or bad is not supported", LABELS)
_TEACHER = ("learning from a teacher's probabilities is not supported", TEACHER)
_STEPS = ("a reward for each step of an answer is not supported", STEPS)
_EVAL = ("generation without training is not converted", "trimtab eval does that")
REFUSED: dict[str, dict[str, tuple[str, str]]] = {
    "trl": {
        **dict.fromkeys(("dpo", "orpo", "cpo", "online_dpo", "xpo", "nash_md", "tpo"), _PAIRS),
        **dict.fromkeys(("kto", "bco"), _LABELS),
        **dict.fromkeys(("gkd", "gold", "minillm", "distillation", "sdft", "sdpo", "ssd"), _TEACHER),
        "prm": _STEPS,
    },
    "openrlhf": {
        "train_sft": ("OpenRLHF's supervised training is not converted", SFT),
        "train_rm": ("OpenRLHF's training of reward models is not converted", REWARD_MODEL),
        "train_dpo": _PAIRS,
        "train_kto": _LABELS,
        "train_kd": _TEACHER,
        "train_prm": _STEPS,
        "batch_inference": _EVAL,
        "serve_rm": ("a served reward model is not converted", 'Name the model itself: reward: [{fn: "model:PATH"}]'),
    },
    "verl": {
        **dict.fromkeys(
            ("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray"), ("verl's supervised training is not converted", SFT)
        ),
        **dict.fromkeys(("main_generation", "main_generation_server", "main_eval"), _EVAL),
    },
    "nanochat": {
        **dict.fromkeys(("chat_sft", "mid_train"), ("nanochat's supervised training is not converted", SFT)),
        "base_train": (
            "training from scratch is not supported",
            "Export nanochat's checkpoint as a Hugging Face folder",
        ),
        "chat_eval": _EVAL,
    },
}
"""What has no counterpart, or is not converted: what is the matter, and what to do."""

_ODDLY_SPELT = {"online_dpo": "OnlineDPO", "nash_md": "NashMD", "minillm": "MiniLLM", "distillation": "Distillation"}
REFUSED_CLASSES = {
    f"{_ODDLY_SPELT.get(name, name.upper())}{end}": name for name in REFUSED["trl"] for end in ("Config", "Trainer")
}
CLASSES = frozenset([name for name in STAGES["trl"] if name.endswith(("Config", "Trainer"))] + [*REFUSED_CLASSES])
"""Classes of TRL that say in a Python script what is trained."""

SIGNS: dict[str, tuple[str, ...]] = {
    "trl-rloo": ("normalize_advantages", "reward_clip_range", "rloo_k", "token_level_kl"),
    "trl-sft": (
        "packing", "packing_strategy", "eval_packing", "padding_free", "completion_only_loss", "assistant_only_loss",
        "dataset_text_field", "dataset_kwargs", "max_seq_length", "neftune_noise_alpha",
    ),
    "trl-reward": ("center_rewards_coefficient",),
    "trl-ppo": (
        "response_length", "num_ppo_epochs", "num_mini_batches", "total_episodes", "kl_coef", "kl_estimator", "cliprange",
        "cliprange_value", "gamma", "lam", "sft_model_path", "stop_token_id", "stop_token", "local_rollout_forward_batch_size",
        "num_sample_generations", "vf_coef", "whiten_rewards", "missing_eos_penalty", "reward_model_path",
    ),
}  # fmt: skip
"""Arguments of TRL that tell its classes apart where no command and no class is named."""
OF_GRPO = (
    "num_generations", "generation_batch_size", "steps_per_generation", "num_iterations", "max_completion_length", "beta",
    "epsilon", "epsilon_high", "delta", "loss_type", "importance_sampling_level", "scale_rewards", "mask_truncated_completions",
    "reward_funcs", "reward_weights",
)  # fmt: skip
"""With one of these it is not PPO, supervised training or a reward model that is configured."""


def kind_of(kind: str, settings: Sequence[Setting]) -> str:
    """The kind whose table fits: what the program or class says, else what the settings show, else the kind asked for."""
    family = kind.split("-")[0]
    programs = list(dict.fromkeys(item.name for item in settings if item.origin == "program"))
    found: dict[str, str] = {}
    for program in programs:
        stage = _stage(family, program)
        if stage:
            found.setdefault(stage, program)
    if len(found) > 1:
        what = f"the settings of {len(found)} training runs are mixed"
        fix = "Give one of them: its command after --, or a file that holds nothing else"
        raise ConfigError([Problem(", ".join(found.values()), what, fix)])
    stage = next(iter(found), "")
    if stage and kind != family and stage != kind:
        program = found[stage]
        raise ConfigError([Problem(program, f"is not what {kind} converts", f"Write trimtab convert {stage}")])
    if not stage and kind == "trl":
        stage = _guessed({item.name.lstrip("-").replace("-", "_") for item in settings})
    return stage or kind


def _stage(family: str, program: str) -> str:
    """The kind of one program; empty where its name says nothing."""
    name = re.sub(r"\.py$", "", program).split(" ")[-1].rsplit("/", 1)[-1].rsplit(".", 1)[-1]
    known, refused = STAGES.get(family, {}), REFUSED.get(family, {})
    if name in known:
        return known[name]
    name = REFUSED_CLASSES.get(name, name)
    if name in refused:
        what, fix = refused[name]
        raise ConfigError([Problem(program, what, fix)])
    if program.startswith("trl ") and family == "trl":
        _no_command(name, [*known, *refused])
    return ""


def _no_command(name: str, names: Sequence[str]) -> NoReturn:
    commands = [word for word in names if word.islower()]
    near = nearest(name, commands, MIN_NAME_SIMILARITY)
    fix = f"Did you mean trl {near}?" if near else "Write trl grpo, rloo, ppo, sft or reward"
    raise ConfigError([Problem(f"trl {name}", "is not a TRL command that Trimtab knows", fix)])


def _guessed(names: set[str]) -> str:
    """The class of TRL whose arguments are given. RLOO shares most of GRPO's, the others have none of them."""
    for kind, signs in SIGNS.items():
        if names & set(signs) and (kind == "trl-rloo" or not names & set(OF_GRPO)):
            return kind
    return ""
