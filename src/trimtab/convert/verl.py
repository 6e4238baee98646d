"""verl: Hydra overrides and YAML of `verl.trainer.main_ppo`."""

from __future__ import annotations

import re
from math import floor

from trimtab.convert.common import (
    adapters,
    as_the_policy,
    choice,
    critic,
    loggers,
    looser,
    optimizer,
    reward_model,
    schedule,
    split_updates,
    steps_from_epochs,
)
from trimtab.convert.rules import PPO, one_of, pair, real, text, texts, whole, yes
from trimtab.convert.sheet import Framework, Sheet
from trimtab.convert.verl_run_table import RUN_RULES
from trimtab.convert.verl_table import CRITIC_KEYS, LEARN_RULES, REWARD_MODEL_KEYS
from trimtab.convert.versions import ABSENT, OldDefault

DEFAULTS = {
    "data.train_batch_size": 1024,
    "A.rollout.n": 1,
    "trainer.total_epochs": 30,
    "A.actor.ppo_mini_batch_size": 256,
    "algorithm.adv_estimator": "gae",
    "algorithm.lam": 1.0,
    "critic.cliprange_value": 0.5,
    "A.actor.policy_loss.loss_mode": "vanilla",
    "A.actor.loss_agg_mode": "token-mean",
    "A.actor.clip_ratio_c": 3.0,
    "A.actor.optim.weight_decay": 0.01,
}
OLD_DEFAULTS = (
    OldDefault("0.4", "A.actor.clip_ratio_c", ABSENT),
    OldDefault("0.4", "A.actor.entropy_coeff", 0.001),
    OldDefault("0.4", "algorithm.use_kl_in_reward", True),
)
"""From ppo_trainer.yaml of every release since 0.3. Before 0.4 the penalty was in the reward unless it was in the loss."""
ALGORITHMS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_ADD = "Add algorithm.adv_estimator=%s at the end to convert the rest with it: the last one counts"
NO_ESTIMATORS = {
    "remax": "ReMax's baseline is a greedy answer; rloo has one without it. " + _ADD % "rloo",
    "opo": "OPO weights its baseline by length; grpo and rloo do not. " + _ADD % "rloo",
    "gpg": "GPG scales by the share of groups with signal. " + _ADD % "grpo",
    "grpo_passk": "only the best sample of a group counts there; write pass@k as a reward. " + _ADD % "grpo",
    "gdpo": "normalise the parts of the reward instead: reward.N.normalize: group. " + _ADD % "grpo",
    "optimal_token_baseline": _ADD % "grpo",
    "tir_optimal_token_baseline": _ADD % "grpo",
}
_LOSS = "Add actor_rollout_ref.actor.policy_loss.loss_mode=vanilla (or gspo, cispo) at the end: the last one counts"
NO_LOSSES = dict.fromkeys(("dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov", "geo_mean", "dro", "bypass_mode"), _LOSS)
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo", "gpg": "on_policy"}
AGGREGATES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
NO_AGGREGATES = {
    "token-sum": "Add actor_rollout_ref.actor.loss_agg_mode=token-mean at the end: it divides by the number of tokens",
}
SHARED_KEYS = {
    "critic.ppo_mini_batch_size": "A.actor.ppo_mini_batch_size",
    "critic.ppo_epochs": "A.actor.ppo_epochs",
    "critic.loss_agg_mode": "A.actor.loss_agg_mode",
    "critic.grad_clip": "A.actor.optim.clip_grad",
    **{
        f"critic.optim.{part}": f"A.actor.optim.{part}"
        for part in ("weight_decay", "betas", "clip_grad", "lr_scheduler_type", "lr_warmup_steps", "min_lr_ratio")
    },
    "critic.optim.lr_warmup_steps_ratio": "A.actor.optim.lr_warmup_steps_ratio",
}
"""What verl has for the critic by itself, and Trimtab for both."""
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
IN_LOSS = ("A.actor.kl_loss_coef", "A.actor.kl_loss_type")
IN_REWARD = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "algorithm.kl_ctrl.type")
ADAPTIVE = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")
OLD_CAP = "tis_imp_ratio_cap"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."


def settle(sheet: Sheet) -> None:
    _algorithm(sheet)
    _sizes(sheet)
    _kl(sheet)
    _clip(sheet)
    _optimizer(sheet)
    _correction(sheet)
    _data(sheet)
    _reward(sheet)
    adapters(sheet, "A.model.lora_rank", "A.model.lora_alpha", "A.model.target_modules")
    if "model.lora.r" in sheet.keys and "model.lora.alpha" not in sheet.keys:
        sheet.put("model.lora.alpha", 16.0, "A.model.lora_rank", note="verl's lora_alpha is 16 whatever the rank")


def _algorithm(sheet: Sheet) -> None:
    name = "algorithm.adv_estimator"
    estimator = choice(sheet, name, ALGORITHMS, NO_ESTIMATORS, "gae")
    algorithm = ALGORITHMS[estimator]
    sheet.put("learn.algorithm", algorithm, name, note=PPO if estimator == "gae" else "")
    _critic(sheet, estimator)
    by_std = "algorithm.norm_adv_by_std_in_grpo"
    if not sheet.read(by_std, yes, True) and algorithm == "grpo":
        sheet.put("learn.advantage", "group_mean", by_std, note="as in Dr. GRPO")
    elif sheet.given(by_std):
        sheet.refuse(by_std, "true is GRPO's default; other estimators ignore it", "dead")
    _loss(sheet)


def _critic(sheet: Sheet, estimator: str) -> None:
    critic(sheet, CRITIC_KEYS, estimator, "algorithm.gamma" if estimator == "reinforce_plus_plus" else "")
    if estimator != "gae":
        return
    as_the_policy(sheet, SHARED_KEYS)
    if (alone := sheet.keys.get("learn.critic.warmup_steps")) and alone.value > 0:
        sheet.put("learn.critic.warmup_steps", alone.value - 1, "trainer.critic_warmup")


def _loss(sheet: Sheet) -> None:
    """The loss of a token and what it weighs, both written out: verl has them whatever the estimator is."""
    mode, agg = "A.actor.policy_loss.loss_mode", "A.actor.loss_agg_mode"
    loss = LOSSES[choice(sheet, mode, LOSSES, NO_LOSSES, "vanilla")]
    sheet.put("learn.loss", loss, mode)
    how = choice(sheet, agg, AGGREGATES, NO_AGGREGATES, "token-mean")
    if loss == "gspo":
        note = "verl averages gspo over sequences, whatever loss_agg_mode says"
        sheet.put("learn.aggregate", "sequence_mean", mode, note=note)
        sheet.refuse(agg, "gspo ignores it", "dead")
        if sheet.read("A.actor.use_kl_loss", yes, False) and how != "seq-mean-token-mean":
            verl = f"verl averages the penalty by loss_agg_mode, {how}, and gspo over sequences"
            differs = f"{verl}; Trimtab averages both over sequences"
            sheet.say("A.actor.use_kl_loss", differs)
        return
    note = (
        "before 0.7 verl takes the mean over micro-batches, Trimtab over the whole update"
        if sheet.before("0.7")
        else ""
    )
    sheet.put("learn.aggregate", AGGREGATES[how], agg, note=note)


def _sizes(sheet: Sheet) -> None:
    prompts = sheet.read("data.train_batch_size", whole, 1024)
    samples = sheet.read("A.rollout.n", whole, 1)
    mini = sheet.read("A.actor.ppo_mini_batch_size", whole, 256)
    sheet.put("learn.prompts_per_step", prompts, "data.train_batch_size")
    sheet.put("learn.samples_per_prompt", samples, "A.rollout.n")
    if min(prompts, mini) > 0:
        split_updates(sheet, prompts, prompts / mini, "A.actor.ppo_mini_batch_size", f"{prompts} / {mini}")
    if "learn.steps" in sheet.keys:
        sheet.refuse("trainer.total_epochs", "total_training_steps wins over it", "dead")
    else:
        steps_from_epochs(sheet, "trainer.total_epochs", prompts)


def _kl(sheet: Sheet) -> None:
    """One penalty: in the loss, or in the reward."""
    in_loss = sheet.read("A.actor.use_kl_loss", yes, False)
    in_reward = sheet.read("algorithm.use_kl_in_reward", yes, False)
    if in_loss:
        _penalty(sheet, "loss", "A.actor.use_kl_loss", *IN_LOSS, "low_var_kl")
        sheet.refuse(
            "algorithm.use_kl_in_reward",
            "Trimtab has one penalty; it keeps the one in the loss" if in_reward else "off",
            "dead",
        )
    else:
        _off(sheet, ("A.actor.use_kl_loss", *IN_LOSS), "has no effect without use_kl_loss=True")
    if not in_reward or in_loss:
        _off(
            sheet, ("algorithm.use_kl_in_reward", *IN_REWARD, *ADAPTIVE), "has no effect without use_kl_in_reward=True"
        )
        return
    _penalty(sheet, "reward", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "kl")
    if sheet.read("algorithm.kl_ctrl.type", text, "fixed") != "adaptive":
        _off(sheet, ("algorithm.kl_ctrl.type", *ADAPTIVE), "the coefficient is fixed")
        return
    target = sheet.read("algorithm.kl_ctrl.target_kl", real, 0.1)
    sheet.put(
        "learn.kl.target",
        target,
        "algorithm.kl_ctrl.type",
        "algorithm.kl_ctrl.target_kl",
        note="nats per token, as in Trimtab",
    )
    if sheet.line("algorithm.kl_ctrl.horizon"):
        sheet.put(
            "learn.kl.horizon", sheet.read("algorithm.kl_ctrl.horizon", whole, 10_000), "algorithm.kl_ctrl.horizon"
        )


def _penalty(sheet: Sheet, where: str, switch: str, coef: str, kind: str, usual: str) -> None:
    sheet.put("learn.kl.where", where, switch)
    sheet.put("learn.kl.coef", sheet.read(coef, real, 0.001), coef if sheet.line(coef) else switch)
    source = kind if sheet.line(kind) else switch
    estimator = sheet.read(kind, one_of(ESTIMATORS), ESTIMATORS[usual])
    sheet.put("learn.kl.estimator", estimator, source)


def _off(sheet: Sheet, names: tuple[str, ...], why: str) -> None:
    for name in names:
        sheet.refuse(name, why, "dead")


def _clip(sheet: Sheet) -> None:
    low, high = sheet.read("A.actor.clip_ratio_low", real), sheet.read("A.actor.clip_ratio_high", real)
    if low is not None:
        sheet.put("learn.clip.low", low, "A.actor.clip_ratio_low")
    if high is not None:
        sheet.put(
            "learn.clip.high",
            high,
            "A.actor.clip_ratio_high",
            note=looser(high, low or 0.2) if high > (low or 0.2) else "",
        )
    bound = sheet.read("A.actor.clip_ratio", real)
    if sheet.before("0.4") and bound is not None:
        sheet.put("learn.clip.low", bound, "A.actor.clip_ratio")
        sheet.put("learn.clip.high", bound, "A.actor.clip_ratio")
    elif sheet.given("A.actor.clip_ratio"):
        why = "clip_ratio_low and clip_ratio_high win over it, and verl sets both to 0.2"
        sheet.refuse("A.actor.clip_ratio", f"{why}. For {bound} write learn.clip.low and learn.clip.high", "dead")
    dual = sheet.read("A.actor.clip_ratio_c", real)
    loss = sheet.keys.get("learn.loss")
    if dual is not None and (loss is None or loss.value == "clip"):
        sheet.put("learn.clip.dual", dual, "A.actor.clip_ratio_c", note="the dual clip is always on in verl")
    else:
        sheet.refuse("A.actor.clip_ratio_c", "only the clipped loss has a dual clip", "dead")


def _optimizer(sheet: Sheet) -> None:
    betas = sheet.read("A.actor.optim.betas", pair)
    if betas is not None:
        sheet.put("learn.optimizer.beta1", betas[0], "A.actor.optim.betas")
        sheet.put("learn.optimizer.beta2", betas[1], "A.actor.optim.betas")
    optim = "A.actor.optim."
    optimizer(sheet, f"{optim}optimizer")
    schedule(
        sheet,
        f"{optim}lr_scheduler_type",
        SCHEDULES,
        f"{optim}lr_warmup_steps_ratio",
        f"{optim}lr_warmup_steps",
        f"{optim}min_lr_ratio",
        rounded=floor,
    )
    if sheet.read("A.actor.strategy", str, "fsdp") == "megatron":
        sheet.say(
            f"{optim}lr_scheduler_type", "Megatron has its own schedule; Trimtab uses that of FSDP (Hugging Face's)"
        )


def _correction(sheet: Sheet) -> None:
    level, cap = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"
    kind = sheet.read(level, one_of({"token": "token", "sequence": "sequence"}))
    bound = sheet.line(cap)
    if kind is None and bound and bound.setting.name.endswith(OLD_CAP) and sheet.read(cap, real, 0.0) > 0:
        sheet.put("learn.importance.level", "token", cap)  # in those versions the cap alone turned it on
        sheet.put("learn.importance.cap", sheet.read(cap, real, 2.0), cap)
        return
    if kind is None:
        sheet.refuse(cap, "has no effect without rollout_is", "dead")
        return
    sheet.put("learn.importance.level", kind, level)
    if sheet.line(cap):
        sheet.put("learn.importance.cap", sheet.read(cap, real, 2.0), cap)


def _data(sheet: Sheet) -> None:
    for name, key in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        files = sheet.read(name, texts, [])
        if files:
            sheet.put(key, files[0], name)
        if len(files) > 1:
            sheet.say(name, f"Trimtab reads one source; add the others to it: {', '.join(files[1:])}")
    refills = sheet.read("algorithm.filter_groups.max_num_gen_batches", whole)
    if refills is not None and refills > 1:
        note = f"{refills} batches are the first and {refills - 1} to fill up"
        sheet.put(
            "learn.dynamic_sampling.max_refills", refills - 1, "algorithm.filter_groups.max_num_gen_batches", note=note
        )
    elif refills is not None:
        sheet.refuse(
            "algorithm.filter_groups.max_num_gen_batches", "0 means no limit in verl; Trimtab needs at least 1"
        )
    loggers(sheet, "trainer.logger", "trainer.project_name", "verl_examples")


def _reward(sheet: Sheet) -> None:
    path = sheet.read("reward.custom_reward_function.path", text)
    function = sheet.read("reward.custom_reward_function.name", text, "compute_score")
    if path is not None:
        note = (
            "Trimtab passes completions and columns as lists, by name, not data_source, solution_str and ground_truth one by "
            "one: change the function's first line and its last"
        )
        source = "reward.custom_reward_function."
        sheet.put("reward.0.fn", f"{path}:{function}", f"{source}path", f"{source}name", note=note)
    else:
        sheet.refuse("reward.custom_reward_function.name", "has no effect without a path", "dead")
    _reward_model(sheet)
    length, factor = sheet.read(f"{OVERLONG}len", whole), sheet.read(f"{OVERLONG}penalty_factor", real, 1.0)
    if sheet.read(f"{OVERLONG}enable", yes, False) and length:
        sheet.put("learn.overlong.buffer", length, f"{OVERLONG}len", f"{OVERLONG}enable")
        sheet.put("learn.overlong.penalty", factor, f"{OVERLONG}penalty_factor")
    else:
        _off(
            sheet,
            (f"{OVERLONG}enable", f"{OVERLONG}len", f"{OVERLONG}penalty_factor"),
            "has no effect unless enabled, with a length",
        )


def _reward_model(sheet: Sheet) -> None:
    enabled, path = "reward.reward_model.enable", "reward.reward_model.model_path"
    if not sheet.read(enabled, yes, False):
        sheet.refuse(path, "has no effect unless reward_model.enable is true", "dead")
        sheet.refuse(enabled, "no reward model is Trimtab's default", "dead")
        return
    function = "reward.0.fn" in sheet.keys
    reward_model(sheet, path)
    if not sheet.read(path, text):
        sheet.refuse(enabled, "names no model: write reward: [{fn: model:PATH}]")
        return
    last = max(key for key in sheet.keys if key.startswith("reward.") and key.endswith(".fn"))
    sheet.put(last, sheet.keys[last].value, path, enabled)
    if function:
        sheet.say(path, "verl uses only the model's scores; Trimtab would add both parts: remove one")


def spelling(name: str) -> str:
    plain = name.lstrip("+~-").replace("-", "_")
    if plain.endswith("._target_"):
        return f"_target_.{plain.removesuffix('._target_')}"
    return re.sub(r"^actor_rollout_ref\.", "A.", plain)


FRAMEWORK = Framework(
    kind="verl",
    title="verl",
    about="Hydra overrides of `verl.trainer.main_ppo`, on a command line or as YAML. `A.` stands for `actor_rollout_ref.`.",
    rules=LEARN_RULES + RUN_RULES + CRITIC_KEYS + REWARD_MODEL_KEYS,
    defaults=DEFAULTS,
    settle=settle,
    spelling=spelling,
    dashes="",
    abbreviations={"actor_rollout_ref": "A"},
    newest="0.9.1",
    oldest="0.3.0",
    was=OLD_DEFAULTS,
)
