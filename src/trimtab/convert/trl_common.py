"""What TRL's classes share: batches that count completions, Hugging Face's schedules, data, rewards, logs and adapters."""

from __future__ import annotations

from typing import Any

from trimtab.convert.common import adapters, loggers, processes, reward_model, schedule, scored_by, steps_from_epochs
from trimtab.convert.rules import mapping, real, text, texts, whole, yes
from trimtab.convert.sheet import Sheet

NEWEST = "1.16.0"
TRAINER_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
}
"""Those of transformers' TrainingArguments, which all of TRL's classes have."""
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
WITHOUT_WARMUP = ("constant",)
"""Schedules for which transformers ignores the warm-up."""
KWARGS = "lr_scheduler_kwargs"
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"fn": "math", "args": {"column": "solution"}},
    "think_format_reward": {"fn": "regex", "args": {"pattern": r"^<think>(?s:.)*</think>(?s:.)*$", "mode": "full"}},
    "get_soft_overlong_punishment": {"fn": "length", "args": {"max_tokens": 1280, "free_tokens": 1024}},
}
"""TRL's own rewards as built-ins of Trimtab."""


def spelling(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def sizes(sheet: Sheet, generations: int) -> None:
    """Batches count completions. One generation batch is a step; what an optimizer step takes of it makes the updates."""
    devices = processes(sheet)
    per_device = sheet.read("per_device_train_batch_size", whole, 8)
    accumulated = sheet.read("gradient_accumulation_steps", whole, 1)
    samples = sheet.read("num_generations", whole, generations)
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


def updates_of(sheet: Sheet) -> int:
    """Optimizer steps that TRL takes on one batch of samples: it counts those, Trimtab counts batches."""
    parts = sheet.keys.get("learn.updates_per_step")
    return (parts.value if parts else 1) * max(sheet.read("num_iterations", whole, 1), 1)


def steps_and_rates(sheet: Sheet, usual: float) -> None:
    """The length of the run and its schedule, for classes that sample."""
    updates = updates_of(sheet)
    periods(sheet, updates)
    if "learn.steps" in sheet.keys:
        sheet.refuse("num_train_epochs", "max_steps wins over it", "dead")
    else:
        prompts = sheet.keys.get("learn.prompts_per_step")
        steps_from_epochs(sheet, "num_train_epochs", prompts.value if prompts else None)
    rates(sheet, usual, updates)


def periods(sheet: Sheet, updates: int) -> None:
    for name, key in (
        ("max_steps", "learn.steps"),
        ("save_steps", "observe.checkpoint_every"),
        ("eval_steps", "observe.eval_every"),
    ):
        steps = sheet.read(name, whole)
        if steps is not None and steps > 0:
            put_period(sheet, key, name, steps, updates)
        elif steps is not None:
            sheet.refuse(name, "has no effect: it is not a number of steps", "dead")


def put_period(sheet: Sheet, key: str, name: str, steps: int, updates: int) -> None:
    note = f"{updates} optimizer steps to a batch: {steps} / {updates}" if updates > 1 else ""
    sheet.put(key, max(round(steps / updates), 1), name, note=note)


def rates(sheet: Sheet, usual: float, updates: int = 1) -> None:
    """Kind and warm-up, counted in optimizer steps, and of cosine_with_min_lr where it ends: a fraction of the rate, or a rate.
    `usual` is the rate unless one is given."""
    schedule(
        sheet, "lr_scheduler_type", SCHEDULES, "warmup_ratio", "warmup_steps", updates=updates, cold=WITHOUT_WARMUP
    )
    kind = sheet.read("lr_scheduler_type", str, "linear")
    fraction, floor = _of_schedule(sheet, "min_lr_rate"), _of_schedule(sheet, "min_lr")
    names = [KWARGS, f"{KWARGS}.min_lr_rate", f"{KWARGS}.min_lr"]
    if not kind.endswith("_with_min_lr"):
        for name in (name for name in names if sheet.read(name, lambda value: value or None)):
            sheet.refuse(name, f"goes with cosine_with_min_lr, and the schedule is {kind}: write learn.schedule.final")
        return
    rate = sheet.keys["learn.lr"].value if "learn.lr" in sheet.keys else usual
    if fraction is not None:
        sheet.put("learn.schedule.final", fraction, *names[:2])
        sheet.refuse(names[2], "TRL accepts only one of the two; Trimtab keeps min_lr_rate", "dead")
    elif floor is not None and rate > 0:
        ends = float(f"{floor / rate:.6g}")
        sheet.put("learn.schedule.final", ends, names[0], names[2], note=f"{floor:g} / a rate of {rate:g}")
    else:
        sheet.say(
            "lr_scheduler_type",
            "TRL needs min_lr_rate or min_lr in lr_scheduler_kwargs; without them Trimtab lets it end at 0",
        )
    others = sorted(map(str, sheet.read(KWARGS, mapping, {}).keys() - {"min_lr_rate", "min_lr"}))
    if others:
        sheet.say(KWARGS, f"Trimtab does not have {', '.join(others)}")


def _of_schedule(sheet: Sheet, part: str) -> float | None:
    """A number of `lr_scheduler_kwargs`, from the whole or, as YAML gives it, by itself."""
    found = sheet.read(KWARGS, lambda value: real(mapping(value)[part]) if part in mapping(value) else None)
    return sheet.read(f"{KWARGS}.{part}", real) if found is None else found


def text_as_it_is(sheet: Sheet) -> None:
    """TRL applies a chat template to messages only."""
    note = "TRL applies no chat template to text; if the rows hold messages, write data.chat_template: auto"
    names = [name for name in ("dataset_name",) if sheet.line(name)]
    sheet.put("data.chat_template", "never", *names, note=note)


def data(sheet: Sheet) -> None:
    name = sheet.read("dataset_name", text)
    part = sheet.read("dataset_config", text)
    if name is not None:
        sheet.put("data.train", f"{name}:{part}" if part else name, "dataset_name", "dataset_config")
    else:
        sheet.refuse("dataset_config", "has no effect without a data set", "dead")
    text_as_it_is(sheet)
    evaluates = sheet.read("eval_strategy", text, "no")
    if evaluates != "no" and name is not None:
        sheet.put("data.eval", sheet.keys["data.train"].value, "eval_strategy")
    if evaluates == "epoch":
        sheet.refuse("eval_strategy", "Trimtab evaluates by steps: write observe.eval_every")
    elif evaluates != "no":
        every_ = sheet.keys.get("observe.eval_every")
        note = "" if every_ else "TRL evaluates as often as it logs, every 10 steps"
        sheet.put("observe.eval_every", every_.value if every_ else 10, "eval_strategy", "eval_steps", note=note)
    else:
        for flag in ("eval_steps", "dataset_test_split", "num_generations_eval"):
            sheet.refuse(flag, "has no effect while eval_strategy is no", "dead")
        sheet.keys.pop("observe.eval_every", None)
        sheet.keys.pop("data.eval_split", None)
        sheet.refuse("eval_strategy", "no evaluation set is Trimtab's default", "dead")
    if sheet.line("num_generations_eval"):
        sheet.put("eval.samples_per_prompt", sheet.read("num_generations_eval", whole, 1), "num_generations_eval")
        if sheet.read("num_generations_eval", whole, 1) > 1:
            sheet.put(
                "eval.sampling.temperature",
                1.0,
                "num_generations_eval",
                note="TRL evaluates with the sampling of training",
            )


def rewards(sheet: Sheet) -> None:
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


def logs(sheet: Sheet) -> None:
    loggers(sheet, "report_to", "project", "huggingface")


def lora(sheet: Sheet) -> None:
    """`model.lora`, from ModelConfig's flags or from PEFT's LoraConfig, which has defaults of its own."""
    peft = "LoraConfig" in sheet.programs
    names = ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
    if not sheet.read("use_peft", yes, peft or sheet.given("lora_r")):
        for name in ("use_peft", *names):
            sheet.refuse(name, "no adapters are trained without use_peft", "dead")
        return
    owner, rank, scale, dropout = ("PEFT", 8, 8.0, 0.0) if peft else ("TRL", 16, 32.0, 0.05)
    source = [name for name in ("lora_r", "use_peft") if sheet.given(name)]
    adapters(sheet, *names, usual=rank)
    sheet.put("model.lora.r", sheet.read("lora_r", whole, rank), *source)
    if not sheet.line("lora_alpha"):
        sheet.put("model.lora.alpha", scale, *source[:1], note=f"{owner}'s lora_alpha is {scale:g} whatever the rank")
    if not sheet.line("lora_target_modules"):
        note = "PEFT adapts q_proj and v_proj of Llama, Qwen, Mistral and Gemma where no modules are named"
        sheet.put("model.lora.targets", ["q_proj", "v_proj"], *source[:1], note=note)
    if not sheet.line("lora_dropout") and dropout and source:
        sheet.say(source[0], f"{owner}'s dropout of {dropout:g} is left out: Trimtab trains without dropout")
