"""TRL's PPOConfig: its arguments, one rule each, and what follows from several. The rest it shares with GRPOConfig."""

from __future__ import annotations

from math import ceil
from typing import Any

from trimtab.convert.common import clip, critic, optimizer, processes, reward_model, steps_from_epochs
from trimtab.convert.rules import (
    NORMALISED,
    REWARD_MODEL,
    ConvertRule,
    automatic,
    dead,
    each,
    one_of,
    real,
    text,
    together,
    unsupported,
    whole,
)
from trimtab.convert.sheet import Framework, Sheet
from trimtab.convert.stages import OF_GRPO
from trimtab.convert.trl_common import TRAINER_DEFAULTS, data, logs, lora, periods, rates, rewards, spelling
from trimtab.convert.trl_table import GRPO_ONLY_NAMES
from trimtab.convert.trl_table import RULES as TABLE

DEFAULTS: dict[str, Any] = {
    **TRAINER_DEFAULTS,
    "response_length": 53,
    "num_ppo_epochs": 4,
    "num_mini_batches": 1,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
}
TEMPERATURE, LEARNING_RATE = 0.7, 3e-6
"""PPOConfig's own, for arguments that GRPOConfig has too."""
OWN_RULES: tuple[ConvertRule, ...] = (
    together("response_length", "learn.max_new_tokens"),
    together("num_ppo_epochs", "learn.epochs_per_step", "passes over one batch of samples"),
    together("num_mini_batches", "learn.updates_per_step"),
    together("total_episodes", "learn.steps", "counted in completions, one for each prompt"),
    together("kl_coef", "learn.kl.coef", "subtracted from the reward, token by token: learn.kl.where"),
    together("kl_estimator", "learn.kl.estimator"),
    together("cliprange", "learn.clip.low"),
    together("cliprange_value", "learn.critic.clip"),
    together("gamma", "learn.critic.gamma"),
    together("lam", "learn.critic.lam", f"TRL normalises advantages in each process; in Trimtab, {NORMALISED}"),
    together("sft_model_path", "model.path"),
    together("stop_token_id", "learn.sampling.stop_token_ids"),
    automatic("stop_token", "the model's own end-of-sequence tokens end a completion", "learn.sampling.stop_token_ids"),
    automatic(
        "local_rollout_forward_batch_size",
        "passes without a gradient have a token budget of their own",
        "run.score_token_budget",
    ),
    automatic("num_sample_generations", "completions are in RUN/samples", "observe.samples_every"),
    dead(
        "vf_coef",
        "a factor that AdamW cancels. In TRL it also divides one gradient-norm limit between policy and critic; in "
        "Trimtab each has its own",
    ),
    *each(
        dead,
        "world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size",
        "TRL computes it itself and ignores the value",
    ),
    unsupported("whiten_rewards", "Trimtab normalises advantages, not rewards"),
    unsupported("missing_eos_penalty", "learn.mask_truncated and learn.overlong are similar"),
    together("reward_model_path", "reward.0.fn", REWARD_MODEL),
    *each(
        unsupported,
        "model_adapter_name ref_adapter_name",
        "Trimtab has one set of adapters; the model without them is the reference",
    ),
)
_OF_GRPO = tuple(dict.fromkeys([*OF_GRPO, *GRPO_ONLY_NAMES.split()]))
RULES: tuple[ConvertRule, ...] = (
    *(rule for rule in TABLE if rule.name not in _OF_GRPO),
    *OWN_RULES,
    *each(dead, " ".join(_OF_GRPO), "belongs to GRPOConfig; PPOConfig does not have it"),
)


def _sign(sheet: Sheet) -> str | None:
    """The first setting that is PPO's alone."""
    found = (line.rule.name for line in sheet.counting(OWN_RULES) if line.given and line.rule)
    return next(found, None)


def not_asked(sheet: Sheet) -> None:
    """All that is PPO's does nothing."""
    sheet.without(
        OWN_RULES, "belongs to PPOConfig, but the other settings are those of GRPOConfig, which has no critic"
    )


def settle(sheet: Sheet) -> None:
    """Its periods and its schedule count batches, as Trimtab's do."""
    _ppo(sheet)
    periods(sheet, 1)
    rates(sheet, LEARNING_RATE)
    optimizer(sheet, "optim")
    data(sheet)
    rewards(sheet)
    logs(sheet)
    lora(sheet)


def _ppo(sheet: Sheet) -> None:
    sheet.put("learn.algorithm", "ppo")
    sheet.put("learn.samples_per_prompt", 1)
    _sizes(sheet)
    _rates(sheet)
    critic(sheet, OWN_RULES, "gae")
    clip(sheet, "cliprange")
    sheet.put("learn.max_new_tokens", sheet.read("response_length", whole, 53), "response_length")
    coef = sheet.read("kl_coef", real, 0.05)
    sheet.put("learn.kl.coef", coef, "kl_coef")
    if coef == 0:
        sheet.refuse("kl_estimator", "has no effect while the coefficient is 0", "dead")
    else:
        sheet.put("learn.kl.where", "reward", "kl_coef")
        sheet.put(
            "learn.kl.estimator", sheet.read("kl_estimator", one_of({"k1": "k1", "k3": "k3"}), "k1"), "kl_estimator"
        )
    _model(sheet)
    stop = sheet.read("stop_token_id", whole)
    if stop is not None:
        sheet.put("learn.sampling.stop_token_ids", [stop], "stop_token_id")


def _sizes(sheet: Sheet) -> None:
    devices = processes(sheet)
    per_device = sheet.read("per_device_train_batch_size", whole, 8)
    accumulated = sheet.read("gradient_accumulation_steps", whole, 1)
    parts = sheet.read("num_mini_batches", whole, 1)
    sheet.put("learn.epochs_per_step", sheet.read("num_ppo_epochs", whole, 4), "num_ppo_epochs")
    if min(per_device, accumulated, parts) < 1:
        return
    local = per_device * accumulated
    prompts = local * devices
    note = f"{per_device} × {accumulated} × {devices} process{'es' * (devices > 1)} = {prompts} prompts, one completion each"
    sheet.put(
        "learn.prompts_per_step", prompts, "per_device_train_batch_size", "gradient_accumulation_steps", note=note
    )
    cut = ceil(local / parts / per_device)
    updates = max(parts * cut // accumulated, 1)
    note = f"{parts} part{'s' * (parts > 1)} of {cut} micro-batch{'es' * (cut > 1)}, an optimizer step after every {accumulated}"
    sheet.put("learn.updates_per_step", min(updates, prompts), "num_mini_batches", note=note)
    episodes = sheet.read("total_episodes", whole)
    if episodes is not None and episodes > 0:
        steps = ceil(episodes / prompts)
        sheet.put("learn.steps", steps, "total_episodes", note=f"{episodes} / {prompts} prompts in a step, rounded up")
        sheet.refuse("num_train_epochs", "total_episodes wins over it", "dead")
    else:
        steps_from_epochs(sheet, "num_train_epochs", prompts)


def _rates(sheet: Sheet) -> None:
    rate = sheet.keys.get("learn.lr")
    if rate is None:
        sheet.put("learn.lr", LEARNING_RATE)
        sheet.put("learn.critic.lr", LEARNING_RATE)
    else:
        sheet.put(
            "learn.critic.lr", rate.value, "learning_rate", note="TRL has one learning rate for policy and critic"
        )
    if "learn.sampling.temperature" not in sheet.keys:
        sheet.put("learn.sampling.temperature", TEMPERATURE)
    said = ["one completion for each prompt", *[f"a rate of {LEARNING_RATE:g}"] * (rate is None)]
    said += [f"a temperature of {TEMPERATURE:g}"] * (not sheet.given("temperature"))
    sheet.say(_sign(sheet) or "", f"PPOConfig has it, so learn.algorithm is ppo, with {' and '.join(said)}")


def _model(sheet: Sheet) -> None:
    path = sheet.read("sft_model_path", text)
    if path is not None:
        sheet.keys.pop("model.path", None)
        sheet.refuse(
            "model_name_or_path", "TRL's script takes the tokenizer from it, the weights from sft_model_path", "dead"
        )
        sheet.put("model.path", path, "sft_model_path")
    reward_model(sheet, "reward_model_path")
    sheet.say(
        "reward_model_path", "TRL's script starts the critic from it too; Trimtab starts the critic from the policy"
    )
    sheet.refuse("max_steps", "TRL's PPO ignores it: total_episodes decides", "dead")


FRAMEWORK = Framework(
    kind="trl-ppo",
    title="TRL",
    about="`PPOConfig`, which TRL had until 1.12. What it shares with `GRPOConfig` is in the table above.",
    rules=RULES,
    defaults=DEFAULTS,
    settle=settle,
    spelling=spelling,
    reads="PPOConfig",
    newest="1.12.0",
    oldest="0.15.0",
)
