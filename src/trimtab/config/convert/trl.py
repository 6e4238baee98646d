"""TRL: GRPOConfig or PPOConfig and what comes with it, as flags, YAML or arguments in Python."""

from __future__ import annotations

from typing import Any

from trimtab.config.convert import trl_ppo
from trimtab.config.convert.common import (
    adapters,
    clip,
    optimizer,
    processes,
    reward_model,
    schedule,
    scored_by,
    steps_from_epochs,
)
from trimtab.config.convert.rules import mapping, one_of, real, text, texts, whole, yes
from trimtab.config.convert.sheet import Framework, Sheet
from trimtab.config.convert.trl_table import RULES

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_train_epochs": 3,
    "loss_type": "dapo",
    "lr_scheduler_type": "linear",
    "max_completion_length": 512,
    **trl_ppo.DEFAULTS,
}
AGGREGATES = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
}
ADVANTAGES = {
    "group": "group_std",
    True: "group_std",
    "batch": "group_mean_global_std",
    "none": "group_mean",
    False: "group_mean",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
KWARGS = "lr_scheduler_kwargs"
LEARNING_RATE = 1e-6
"""GRPOConfig's own, which is Trimtab's too."""
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"fn": "math", "args": {"column": "solution"}},
    "think_format_reward": {"fn": "regex", "args": {"pattern": r"^<think>(?s:.)*</think>(?s:.)*$", "mode": "full"}},
    "get_soft_overlong_punishment": {"fn": "length", "args": {"max_tokens": 1280, "free_tokens": 1024}},
}
"""TRL's own rewards as built-ins of Trimtab."""


def settle(sheet: Sheet) -> None:
    if trl_ppo.asked(sheet):
        trl_ppo.settle(sheet)
        _periods(sheet, 1)
        _schedule(sheet)
    else:
        trl_ppo.not_asked(sheet)
        _grpo(sheet)
    optimizer(sheet, "optim")
    _correction(sheet)
    _data(sheet)
    _rewards(sheet)
    _logging(sheet)
    _lora(sheet)


def _grpo(sheet: Sheet) -> None:
    _sizes(sheet)
    updates = _updates(sheet)
    _periods(sheet, updates)
    _algorithm(sheet)
    clip(sheet, "epsilon", high="epsilon_high")
    _cispo(sheet)
    _kl(sheet)
    if "learn.steps" in sheet.keys:
        sheet.refuse("num_train_epochs", "max_steps wins over it", "dead")
    else:
        prompts = sheet.keys.get("learn.prompts_per_step")
        steps_from_epochs(sheet, "num_train_epochs", prompts.value if prompts else None)
    _schedule(sheet)
    warmup = sheet.keys.get("learn.schedule.warmup_steps")
    if warmup and updates > 1 and sheet.read("warmup_steps", real, 0) >= 1:
        _put_period(sheet, "learn.schedule.warmup_steps", "warmup_steps", warmup.value, updates)


def _schedule(sheet: Sheet) -> None:
    """Kind and warm-up, and of cosine_with_min_lr where it ends: a fraction of the rate, or a rate."""
    schedule(sheet, "lr_scheduler_type", SCHEDULES, "warmup_ratio", "warmup_steps")
    kind = sheet.read("lr_scheduler_type", text, "linear")
    fraction, floor = _of_schedule(sheet, "min_lr_rate"), _of_schedule(sheet, "min_lr")
    names = [KWARGS, f"{KWARGS}.min_lr_rate", f"{KWARGS}.min_lr"]
    if not kind.endswith("_with_min_lr"):
        for name in (name for name in names if sheet.read(name, lambda value: value or None)):
            sheet.refuse(name, f"goes with cosine_with_min_lr, and the schedule is {kind}: write learn.schedule.final")
        return
    rate = sheet.keys["learn.lr"].value if "learn.lr" in sheet.keys else LEARNING_RATE
    if fraction is not None:
        sheet.put("learn.schedule.final", fraction, *names[:2])
        sheet.refuse(names[2], "TRL takes one of the two; min_lr_rate is kept", "dead")
    elif floor is not None and rate > 0:
        ends = float(f"{floor / rate:.6g}")
        sheet.put("learn.schedule.final", ends, names[0], names[2], note=f"{floor:g} / a rate of {rate:g}")
    else:
        sheet.say(
            "lr_scheduler_type", "TRL wants min_lr_rate or min_lr with it, in lr_scheduler_kwargs; here it ends at 0"
        )
    others = sorted(map(str, sheet.read(KWARGS, mapping, {}).keys() - {"min_lr_rate", "min_lr"}))
    if others:
        sheet.say(KWARGS, f"not here: {', '.join(others)}")


def _of_schedule(sheet: Sheet, part: str) -> float | None:
    """A number of `lr_scheduler_kwargs`, from the whole or, as YAML gives it, by itself."""
    found = sheet.read(KWARGS, lambda value: real(mapping(value)[part]) if part in mapping(value) else None)
    return sheet.read(f"{KWARGS}.{part}", real) if found is None else found


def _sizes(sheet: Sheet) -> None:
    """Batches count completions. One generation batch is a step; what an optimizer step takes of it makes the updates."""
    devices = processes(sheet)
    per_device = sheet.read("per_device_train_batch_size", whole, 8)
    accumulated = sheet.read("gradient_accumulation_steps", whole, 1)
    samples = sheet.read("num_generations", whole, 8)
    whole_batch = sheet.read("generation_batch_size", whole)
    steps = sheet.read("steps_per_generation", whole, accumulated)
    sheet.put("learn.samples_per_prompt", samples, "num_generations")
    if min(per_device, accumulated, samples, devices) < 1:
        return
    generated = whole_batch or per_device * devices * steps
    sum_ = "" if whole_batch else f"{per_device} × {steps} × {devices} process{'es' * (devices > 1)} = "
    prompts = max(round(generated / samples), 1)
    note = f"{sum_}{generated} / {samples} = {generated / samples:.10g} prompts"
    if prompts * samples != generated:
        note += f", which TRL refuses; {prompts} is the nearest"
    elif devices == 1 and not whole_batch:
        note += ". If several processes ran, multiply by their number"
    source = "generation_batch_size" if whole_batch else "per_device_train_batch_size"
    sheet.put(
        "learn.prompts_per_step", prompts, source, "gradient_accumulation_steps", "steps_per_generation", note=note
    )
    if whole_batch:
        sheet.put("learn.prompts_per_step", prompts, "generation_batch_size", "per_device_train_batch_size")
        sheet.put("learn.prompts_per_step", prompts, "generation_batch_size", "gradient_accumulation_steps")
    trained = per_device * devices * accumulated
    updates = min(max(round(generated / trained), 1), prompts)
    if updates > 1 or sheet.given("steps_per_generation", "generation_batch_size"):
        name = "steps_per_generation" if sheet.given("steps_per_generation") else source
        why = f"{generated} / {trained} = {generated / trained:.10g} optimizer steps for each batch"
        sheet.put("learn.updates_per_step", updates, name, note=why)


def _updates(sheet: Sheet) -> int:
    """Optimizer steps that TRL takes on one batch of samples: it counts those, Trimtab counts batches."""
    parts = sheet.keys.get("learn.updates_per_step")
    return (parts.value if parts else 1) * max(sheet.read("num_iterations", whole, 1), 1)


def _periods(sheet: Sheet, updates: int) -> None:
    for name, key in (
        ("max_steps", "learn.steps"),
        ("save_steps", "observe.checkpoint_every"),
        ("eval_steps", "observe.eval_every"),
    ):
        steps = sheet.read(name, whole)
        if steps is not None and steps > 0:
            _put_period(sheet, key, name, steps, updates)
        elif steps is not None:
            sheet.refuse(name, "says nothing: it is no number of steps", "dead")


def _put_period(sheet: Sheet, key: str, name: str, steps: int, updates: int) -> None:
    note = f"{updates} optimizer steps to a batch: {steps} / {updates}" if updates > 1 else ""
    sheet.put(key, max(round(steps / updates), 1), name, note=note)


def _algorithm(sheet: Sheet) -> None:
    kind = sheet.read("loss_type", text, "dapo")
    level = sheet.read("importance_sampling_level", text, "token")
    sheet.put(
        "learn.algorithm", "dr_grpo" if kind == "dr_grpo" else "cispo" if kind == "cispo" else "grpo", "loss_type"
    )
    if kind in AGGREGATES:
        notes = {
            "dapo": "of DAPO TRL takes the token mean only: clipping stays at epsilon and no group is dropped",
            "bnpo": "TRL takes the mean over one process's micro-batch, Trimtab over the whole update",
        }
        sheet.put("learn.aggregate", AGGREGATES[kind], "loss_type", note=notes.get(kind, ""))
    else:
        sheet.say("loss_type", f"{kind} is not here; grpo's clipped loss with a token mean is the nearest")
        sheet.put("learn.aggregate", "token_mean", "loss_type")
    scale = sheet.read("scale_rewards", one_of(ADVANTAGES), "group_std")
    if sheet.line("scale_rewards"):
        apart = "TRL divides by the deviation of the rewards, Trimtab by that of what the groups' means leave"
        sheet.put("learn.advantage", scale, "scale_rewards", note=apart if scale == "group_mean_global_std" else "")
    elif kind == "dr_grpo":
        sheet.put(
            "learn.advantage",
            "group_std",
            "loss_type",
            note="TRL divides by the deviation still; scale_rewards=none is Dr. GRPO's",
        )
    if level == "sequence":
        sheet.put(
            "learn.loss", "gspo", "importance_sampling_level", note="GSPO; its bounds are far smaller: 3e-4 and 4e-4"
        )
    elif sheet.given("importance_sampling_level"):
        sheet.put("learn.loss", "cispo" if kind == "cispo" else "clip", "importance_sampling_level")


def _cispo(sheet: Sheet) -> None:
    """TRL's CISPO bounds the ratio itself; Trimtab bounds its distance from 1."""
    if sheet.read("loss_type", text) != "cispo":
        return
    bound = sheet.read("epsilon_high", real)
    if bound is not None and bound > 1:
        sheet.put(
            "learn.clip.high", bound - 1, "epsilon_high", note=f"TRL bounds the ratio at {bound:g}: 1 + {bound - 1:g}"
        )
    sheet.keys.pop("learn.clip.low", None)
    sheet.refuse("epsilon", "CISPO has no lower bound in TRL", "dead")


def _kl(sheet: Sheet) -> None:
    """Since its version 1.16 at the latest TRL multiplies the KL by the ratio unless it is told not to."""
    name = "use_bias_correction_kl"
    if sheet.read("beta", real, 0.0) == 0:
        sheet.refuse(name, "has no effect while beta is 0", "dead")
        return
    note = (
        ""
        if sheet.line(name)
        else "TRL's use_bias_correction_kl, on by default; older versions had none: then leave it out"
    )
    if sheet.read(name, yes, True):
        sheet.put("learn.kl.corrected", True, name if sheet.line(name) else "beta", note=note)
    else:
        sheet.refuse(name, "the plain estimator is what Trimtab starts from", "dead")


def _correction(sheet: Sheet) -> None:
    mode, cap = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
    if not sheet.read("vllm_importance_sampling_correction", yes, False):
        for name in (mode, cap):
            sheet.refuse(
                name,
                "the engine generates with the trainer's own weights; say the correction itself to have it",
                "automatic",
            )
        if sheet.given("vllm_importance_sampling_correction"):
            sheet.put("learn.importance.level", "off", "vllm_importance_sampling_correction")
        return
    level, _, how = sheet.read(mode, text, "sequence_mask").partition("_")
    sheet.put("learn.importance.level", level, "vllm_importance_sampling_correction", mode)
    sheet.put("learn.importance.mode", how, mode if sheet.line(mode) else "vllm_importance_sampling_correction")
    bound = sheet.read(cap, real, 3.0)
    sheet.put("learn.importance.cap", bound, cap if sheet.line(cap) else "vllm_importance_sampling_correction")


def _data(sheet: Sheet) -> None:
    name = sheet.read("dataset_name", text)
    part = sheet.read("dataset_config", text)
    if name is not None:
        sheet.put("data.train", f"{name}:{part}" if part else name, "dataset_name", "dataset_config")
    else:
        sheet.refuse("dataset_config", "has no effect without a data set", "dead")
    evaluates = sheet.read("eval_strategy", text, "no")
    if evaluates != "no" and name is not None:
        sheet.put("data.eval", sheet.keys["data.train"].value, "eval_strategy")
    if evaluates == "epoch":
        sheet.refuse("eval_strategy", "Trimtab evaluates every so many steps: write observe.eval_every")
    elif evaluates != "no":
        every_ = sheet.keys.get("observe.eval_every")
        note = "" if every_ else "TRL evaluates as often as it logs, every 10 steps"
        sheet.put("observe.eval_every", every_.value if every_ else 10, "eval_strategy", "eval_steps", note=note)
    else:
        for flag in ("eval_steps", "dataset_test_split", "num_generations_eval"):
            sheet.refuse(flag, "has no effect while eval_strategy is no", "dead")
        sheet.keys.pop("observe.eval_every", None)
        sheet.keys.pop("data.eval_split", None)
        sheet.refuse("eval_strategy", "no evaluation set is what Trimtab starts from", "dead")
    if sheet.line("num_generations_eval"):
        sheet.put("eval.samples_per_prompt", sheet.read("num_generations_eval", whole, 1), "num_generations_eval")
        if sheet.read("num_generations_eval", whole, 1) > 1:
            sheet.put(
                "eval.sampling.temperature",
                1.0,
                "num_generations_eval",
                note="TRL evaluates with the sampling of training",
            )


def _rewards(sheet: Sheet) -> None:
    if any(key.startswith("reward.") for key in sheet.keys):  # PPO's, which has no functions
        return
    reward_model(sheet, "reward_model_name_or_path")
    first = sum(key.startswith("reward.") and key.endswith(".fn") for key in sheet.keys)
    functions = sheet.read("reward_funcs", texts, [])
    weights = sheet.read(
        "reward_weights", lambda value: [real(x) for x in (value if isinstance(value, list) else [value])], []
    )
    moved = []
    for place, name in enumerate(functions, first):
        part = REWARDS.get(name)
        if part is None and "/" in name:
            scored_by(sheet, name, "reward_funcs")
            continue
        if part is None:
            module, _, function = name.strip("'\"").rpartition(".")
            part = {"fn": f"{module}:{function}" if module else f"rewards.py:{function}"}
            moved += [] if module else [function]
        for field, value in part.items():
            sheet.put(f"reward.{place}.{field}", value, "reward_funcs")
    count = first + len(functions)
    for place, weight in enumerate(weights if len(weights) == count else []):
        sheet.put(f"reward.{place}.weight", weight, "reward_weights")
    if moved:
        sheet.say("reward_funcs", f"put {', '.join(moved)} into rewards.py; a reward takes what TRL's takes")
    if len(weights) != count:
        sheet.refuse("reward_weights", f"{len(weights)} weights for {count} reward functions: write reward.N.weight")


def _logging(sheet: Sheet) -> None:
    to = sheet.read("report_to", texts, [])
    project = sheet.read("project", text, "huggingface")
    if "wandb" in to:
        sheet.put("observe.wandb", project, "report_to", "project", note="the name of the project")
    else:
        sheet.refuse("report_to", "console, metrics.jsonl and TensorBoard are always written", "automatic")
        sheet.refuse("project", "the run is named for its folder: observe.dir", "automatic")


def _lora(sheet: Sheet) -> None:
    if sheet.read("use_peft", yes, sheet.given("lora_r")):
        if not sheet.given("lora_r"):
            sheet.put("model.lora.r", 16, "use_peft", note="TRL's rank and alpha, unless they are given")
            sheet.put("model.lora.alpha", 32.0, "use_peft")
            for name, key in (("lora_alpha", "model.lora.alpha"), ("lora_target_modules", "model.lora.targets")):
                if (line := sheet.line(name)) is not None:
                    sheet.put(key, line.setting.value, name)
            return
        sheet.put("model.lora.r", sheet.read("lora_r", whole, 16), "lora_r", "use_peft")
        adapters(sheet, "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
        if not sheet.line("lora_alpha"):
            sheet.put("model.lora.alpha", 32.0, "lora_r", note="TRL's lora_alpha is 32 whatever the rank")
        return
    for name in ("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout"):
        sheet.refuse(name, "no adapters are trained without use_peft", "dead")


def spelling(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


FRAMEWORK = Framework(
    kind="trl",
    title="TRL",
    about="`GRPOConfig` or `PPOConfig`, `ModelConfig` and `ScriptArguments`: flags of a command, its YAML, or arguments in a "
    "Python script. PPO is what is meant where something is given that `PPOConfig` alone has.",
    rules=RULES + trl_ppo.RULES,
    defaults=DEFAULTS,
    settle=settle,
    spelling=spelling,
)
