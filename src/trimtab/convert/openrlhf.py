"""OpenRLHF: `train_ppo_ray`, with the dotted names of 0.10 and later and the underscored ones before."""

from __future__ import annotations

from typing import Any

from trimtab.convert.common import (
    adapters,
    as_the_policy,
    choice,
    clip,
    critic,
    looser,
    optimizer,
    reward_model,
    schedule,
    split_updates,
    steps_from_epochs,
)
from trimtab.convert.openrlhf_table import CRITIC_FLAGS, REWARD_MODEL_FLAGS, RULES, STAGE_FLAGS
from trimtab.convert.rules import PPO, number, one_of, pair, real, text, whole, yes
from trimtab.convert.sheet import Framework, Sheet
from trimtab.convert.versions import ABSENT, OldDefault

DEFAULTS = {
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.num_episodes": 1,
    "data.max_len": 2048,
    "algo.advantage.estimator": "gae",
    "algo.advantage.lambd": 1.0,
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "algo.kl.use_loss": False,
    "actor.policy_loss_type": "ppo",
    "reward.clip_range": [-10, 10],
    "actor.adam.betas": [0.9, 0.95],
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
}
OLD_DEFAULTS = (
    OldDefault("0.9.8", "prompt_max_len", 1024),
    OldDefault("0.9.8", "rollout.max_new_tokens", 1024),
    OldDefault("0.9.8", "data.max_len", ABSENT),
    OldDefault("0.8.2", "critic.value_clip", 0.2),
)
"""From train_ppo_ray.py of every release since 0.7."""
ALGORITHMS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
GROUPED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
"""Estimators that compare the samples of a prompt, and take the penalty and the bounds of the reward after that."""
WITHOUT_STD = {"reinforce_pp": "batch_mean", "reinforce_pp_baseline": "group_mean"}
SHARED_PARTS = (
    "adam.betas",
    "adam.eps",
    "adam.weight_decay",
    "max_norm",
    "optim",
    "lr_scheduler",
    "lr_warmup_ratio",
    "min_lr_ratio",
)
"""What OpenRLHF has for the critic by itself, and Trimtab for both."""
SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
CORRECTIONS = {"tis": "truncate", "icepop": "mask"}
SEQUENCE_TARGET = 1.0
"""A KL target above this, in nats, can only have been meant for a whole completion."""


def settle(sheet: Sheet) -> None:
    _algorithm(sheet)
    _critic(sheet)
    _sizes(sheet)
    _lengths(sheet)
    _kl(sheet)
    _clip(sheet)
    _optimizer(sheet)
    _correction(sheet)
    _staleness(sheet)
    _data(sheet)
    _reward(sheet)
    _logging(sheet)
    adapters(sheet, "ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules", "ds.lora.dropout")


def _algorithm(sheet: Sheet) -> None:
    name = "algo.advantage.estimator"
    estimator = choice(sheet, name, ALGORITHMS, {}, "gae")
    algorithm = ALGORITHMS[estimator]
    sheet.put("learn.algorithm", algorithm, name, note=PPO if estimator == "gae" else "")
    kind = "actor.policy_loss_type"
    if choice(sheet, kind, ("ppo", "gspo"), {}, "ppo") == "gspo":
        sheet.put("learn.loss", "gspo", kind, note="gives every sequence the same weight")
        sheet.put("learn.aggregate", "sequence_mean", kind)
    else:
        sheet.put("learn.loss", "clip", kind)
        sheet.put(
            "learn.aggregate", "token_mean", kind, note="OpenRLHF always gives every token of a batch the same weight"
        )
    if estimator in GROUPED:
        sheet.keys.pop("learn.reward_clip", None)
        differs = (
            "OpenRLHF clips after the baseline is subtracted, learn.reward_clip before: write it in units of the reward"
        )
        if sheet.given("reward.clip_range"):
            sheet.refuse("reward.clip_range", differs)
    if sheet.read("algo.advantage.no_std_norm", yes, False):
        if algorithm in WITHOUT_STD:
            note = "OpenRLHF also subtracts the mean over tokens; this advantage does not" * (
                algorithm != "reinforce_pp"
            )
            sheet.put("learn.advantage", WITHOUT_STD[algorithm], "algo.advantage.no_std_norm", note=note)
        elif algorithm == "ppo":
            sheet.refuse("algo.advantage.no_std_norm", "PPO always divides advantages by their standard deviation")
        else:
            sheet.refuse("algo.advantage.no_std_norm", f"has no effect with {estimator} in OpenRLHF", "dead")


def _critic(sheet: Sheet) -> None:
    name = "algo.advantage.estimator"
    estimator = sheet.read(name, text, "gae")
    critic(sheet, CRITIC_FLAGS, estimator, "algo.advantage.gamma" if estimator == "reinforce" else "")
    if estimator == "gae":
        as_the_policy(sheet, {f"critic.{part}": f"actor.{part}" for part in SHARED_PARTS})
        if sheet.given("reward.model_name_or_path") and "learn.critic.path" not in sheet.keys:
            sheet.say(
                "reward.model_name_or_path",
                "OpenRLHF starts the critic from it too; Trimtab starts the critic from the policy",
            )


def _sizes(sheet: Sheet) -> None:
    prompts = sheet.read("rollout.batch_size", whole, 1024)
    samples = sheet.read("rollout.n_samples_per_prompt", whole, 1)
    trained = sheet.read("train.batch_size", whole, 128)
    sheet.put("learn.prompts_per_step", prompts, "rollout.batch_size")
    sheet.put("learn.samples_per_prompt", samples, "rollout.n_samples_per_prompt")
    if min(prompts, samples, trained) > 0:
        sum_ = f"{prompts} × {samples} / {trained}"
        split_updates(sheet, prompts, prompts * samples / trained, "train.batch_size", sum_)
    steps_from_epochs(sheet, "train.num_episodes", prompts)


def _lengths(sheet: Sheet) -> None:
    """OpenRLHF bounds prompt and completion together; Trimtab bounds each."""
    new = sheet.read("rollout.max_new_tokens", whole)
    prompt = sheet.read("prompt_max_len", whole)
    total = sheet.read("data.max_len", whole, 2048)
    if new is not None:
        sheet.put("learn.max_new_tokens", new, "rollout.max_new_tokens")
        if prompt is None and sheet.given("data.max_len") and total > new:
            note = f"{total} - {new} tokens are left for the prompt"
            sheet.put("data.max_prompt_tokens", total - new, "data.max_len", note=note)
        elif sheet.given("data.max_len"):
            sheet.refuse(
                "data.max_len",
                "has no further effect: the prompt and the completion already have limits of their own",
                "dead",
            )
    else:
        given = prompt if prompt is not None and prompt < total else total // 2
        note = f"Trimtab limits each by itself: {total - given} new tokens, {given} of the prompt"
        sheet.put("learn.max_new_tokens", total - given, "data.max_len", note=note)
        if prompt is None:
            sheet.put("data.max_prompt_tokens", given, "data.max_len")
    if prompt is not None:
        sheet.put("data.max_prompt_tokens", prompt, "prompt_max_len", note="longer prompts are left out, never cut")


def _kl(sheet: Sheet) -> None:
    coef = sheet.read("algo.kl.init_coef", real, 0.0)
    sheet.put("learn.kl.coef", coef, "algo.kl.init_coef")
    others = ("algo.kl.estimator", "algo.kl.use_loss", "algo.kl.target", "algo.kl.horizon")
    if coef == 0:
        for name in others:
            sheet.refuse(name, "has no effect while the coefficient is 0", "dead")
        return
    where = "loss" if sheet.read("algo.kl.use_loss", yes, False) else "reward"
    note = ""
    if where == "reward" and sheet.read("algo.advantage.estimator", text, "gae") in GROUPED:
        where, note = "advantage", "OpenRLHF subtracts the penalty after the baseline, token by token"
    sheet.put("learn.kl.where", where, "algo.kl.use_loss", note=note)
    estimator = sheet.read("algo.kl.estimator", one_of({"k1": "k1", "k2": "k2", "k3": "k3"}), "k1")
    sheet.put("learn.kl.estimator", estimator, "algo.kl.estimator")
    target = sheet.read("algo.kl.target", real)
    horizon = sheet.read("algo.kl.horizon", whole)
    if target is None:
        sheet.refuse("algo.kl.horizon", "has no effect without a target", "dead")
        return
    note = ""
    tokens = sheet.keys["learn.max_new_tokens"].value if "learn.max_new_tokens" in sheet.keys else 0
    if target > SEQUENCE_TARGET and tokens > 0:
        note = f"{target:g} can only be meant for a whole completion: {target:g} / {tokens} new tokens"
        target = round(target / tokens, 6)
    sheet.put("learn.kl.target", target, "algo.kl.target", note=note)
    if horizon is not None:
        sheet.put("learn.kl.horizon", horizon, "algo.kl.horizon")


def _clip(sheet: Sheet) -> None:
    both = sheet.read("actor.eps_clip_low_high", pair)
    if both is None:
        clip(sheet, "actor.eps_clip")
        return
    low, high = both
    sheet.put("learn.clip.low", low, "actor.eps_clip_low_high")
    sheet.put("learn.clip.high", high, "actor.eps_clip_low_high", note=looser(high, low) if high > low else "")
    sheet.refuse("actor.eps_clip", "eps_clip_low_high wins over it", "dead")


def _optimizer(sheet: Sheet) -> None:
    betas = sheet.read("actor.adam.betas", pair)
    if betas is not None:
        sheet.put("learn.optimizer.beta1", betas[0], "actor.adam.betas")
        sheet.put("learn.optimizer.beta2", betas[1], "actor.adam.betas")
    optimizer(sheet, "actor.optim")
    parts = sheet.keys.get("learn.updates_per_step")
    updates = (parts.value if parts else 1) * max(sheet.read("train.max_epochs", whole, 1), 1)
    schedule(
        sheet,
        "actor.lr_scheduler",
        SCHEDULES,
        "actor.lr_warmup_ratio",
        floor="actor.min_lr_ratio",
        updates=updates,
        cold=("constant",),
    )


def _staleness(sheet: Sheet) -> None:
    """OpenRLHF's queue bounds how old samples are; here they are exactly so old."""
    enabled, size = "train.async_enable", "train.async_queue_size"
    if not sheet.read(enabled, yes, False):
        for name in (enabled, size):
            sheet.refuse(name, "has no effect: asynchronous training is off", "dead")
        return
    note = "samples are exactly so many steps old. For rollout on devices of its own write run.placement: {actor: N, rollout: M}"
    sheet.put("learn.staleness", sheet.read(size, whole, 1), enabled, *([size] if sheet.line(size) else []), note=note)


def _correction(sheet: Sheet) -> None:
    rest = ("algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold")
    if not sheet.read("algo.advantage.is_correction_enable", yes, False):
        for name in ("algo.advantage.is_correction_enable", *rest):
            sheet.refuse(name, "has no effect: the correction is off", "dead")
        return
    mode = sheet.read(rest[0], one_of(CORRECTIONS), "truncate")
    if (line := sheet.line(rest[0])) and line.outcome == "unsupported":
        sheet.refuse(
            "algo.advantage.is_correction_enable",
            "belongs to a correction that Trimtab does not have: write learn.importance",
        )
        sheet.refuse(rest[1], "belongs to a correction that Trimtab does not have")
        return
    low, high = sheet.read(rest[1], _bounds, (0.0, 2.0) if sheet.before("0.9.2") else (0.5, 5.0))
    sheet.put("learn.importance.level", "token", "algo.advantage.is_correction_enable")
    sheet.put("learn.importance.mode", mode, rest[0] if sheet.line(rest[0]) else "algo.advantage.is_correction_enable")
    sheet.put("learn.importance.cap", high, rest[1] if sheet.line(rest[1]) else "algo.advantage.is_correction_enable")
    if low > 0:
        said = rest[1] if sheet.line(rest[1]) else "algo.advantage.is_correction_enable"
        sheet.say(said, f"Trimtab has only the upper bound; it keeps weights below {low:g} as they are")


def _bounds(value: Any) -> tuple[float, float]:
    """A lower and an upper bound, or, as before 0.9.2, the upper one."""
    low, high = pair(value) if isinstance(value, list) else (0.0, real(value))
    return low, high


def _data(sheet: Sheet) -> None:
    source = sheet.read("data.prompt_dataset", text)
    if source is not None:
        first, *more = source.split(",")
        sheet.put("data.train", first.strip(), "data.prompt_dataset")
        if more:
            sheet.say("data.prompt_dataset", f"Trimtab reads one source; add the others to it: {', '.join(more)}")
        column = sheet.read("data.input_key", text, "input")
        sheet.put("data.prompt", column, "data.input_key" if sheet.given("data.input_key") else "data.prompt_dataset")
        template = sheet.read("data.apply_chat_template", yes, False)
        name = "data.apply_chat_template" if sheet.given("data.apply_chat_template") else "data.prompt_dataset"
        sheet.put("data.chat_template", "always" if template else "never", name)
    elif sheet.given("data.input_key"):
        sheet.put("data.prompt", sheet.read("data.input_key", text, "input"), "data.input_key")
    if sheet.line("data.apply_chat_template") and source is None:
        template = sheet.read("data.apply_chat_template", yes, False)
        sheet.put("data.chat_template", "always" if template else "never", "data.apply_chat_template")
    if "data.eval" in sheet.keys and not sheet.given("eval.temperature"):
        sheet.put(
            "eval.sampling.temperature", 0.6, "eval.dataset", note="OpenRLHF evaluates at 0.6, 4 samples a prompt"
        )
    if "data.eval" in sheet.keys and not sheet.given("eval.n_samples_per_prompt"):
        sheet.put("eval.samples_per_prompt", 4, "eval.dataset")


def _reward(sheet: Sheet) -> None:
    source = sheet.read("reward.remote_url", text)
    if source is not None and source.endswith(".py"):
        note = (
            "Trimtab passes completions and columns by name, not queries, prompts and labels, and wants a list of numbers: "
            "change the function's first line and its last"
        )
        sheet.put("reward.0.fn", f"{source}:reward_func", "reward.remote_url", note=note)
        sheet.refuse("reward.model_name_or_path", "has no effect: OpenRLHF calls remote_url instead", "dead")
    elif source is None:
        reward_model(sheet, "reward.model_name_or_path")
    else:
        sheet.refuse("reward.model_name_or_path", "has no effect: OpenRLHF calls remote_url instead", "dead")
        sheet.refuse(
            "reward.remote_url", f"write a reward function that asks {source}; it may be async: rewards.py:ask"
        )
    buffer = sheet.read("reward.overlong_buffer_len", number)
    if buffer is not None:
        sheet.put("learn.overlong.buffer", int(buffer), "reward.overlong_buffer_len")
        if sheet.line("reward.overlong_penalty_factor"):
            factor = sheet.read("reward.overlong_penalty_factor", real, 1.0)
            sheet.put("learn.overlong.penalty", factor, "reward.overlong_penalty_factor")
    else:
        sheet.refuse("reward.overlong_penalty_factor", "has no effect without overlong_buffer_len", "dead")
    limits = sheet.read("algo.dynamic_filtering_range", pair)
    if limits is not None and limits != [0.0, 1.0]:
        sheet.refuse(
            "algo.dynamic_filtering_range", "Trimtab drops the groups whose rewards are all equal, whatever their value"
        )
    elif limits is not None:
        sheet.refuse(
            "algo.dynamic_filtering_range",
            "0 and 1 drop the groups whose rewards are all equal, which Trimtab always does",
            "dead",
        )


def _logging(sheet: Sheet) -> None:
    key: Any = sheet.line("logger.wandb.key")
    project = sheet.read("logger.wandb.project", text, "openrlhf_train_ppo")
    if key is not None and key.setting.value is not None:
        sheet.put("observe.wandb", project, "logger.wandb.key", "logger.wandb.project")
        note = "the name of the project. Put the API key into WANDB_API_KEY: other users can read a command line"
        sheet.say("logger.wandb.key", note)
    else:
        sheet.refuse("logger.wandb.project", "has no effect without a key", "dead")


def spelling(name: str) -> str:
    return name.lstrip("-+").replace("-", "_")


FRAMEWORK = Framework(
    kind="openrlhf",
    title="OpenRLHF",
    about="Flags of `openrlhf.cli.train_ppo_ray`: today's dotted names, and the underscored ones they replaced in April 2026.",
    rules=RULES + CRITIC_FLAGS + REWARD_MODEL_FLAGS + STAGE_FLAGS,
    defaults=DEFAULTS,
    settle=settle,
    spelling=spelling,
    alias="today's name is {}",
    newest="0.11.2",
    oldest="0.7.0",
    was=OLD_DEFAULTS,
)
