"""Constants of a script of one's own, by the names that such scripts give them: `GRPO_BATCH_SIZE = 2`, `K_ROLLOUTS = 4`."""

from __future__ import annotations

from trimtab.convert.common import adapters, clip
from trimtab.convert.rules import (
    SFT,
    ConvertRule,
    automatic,
    each,
    every,
    mapped,
    norm,
    number,
    positive,
    real,
    text,
    together,
    unsupported,
    whole,
)
from trimtab.convert.sheet import Framework, Sheet

SFT_CONSTANTS: tuple[ConvertRule, ...] = (
    *each(unsupported, "sft_maxlen sft_max_length sft_batch_size sft_epochs sft_lr sft_steps sft_learning_rate", SFT),
)
"""What belongs to a stage of supervised training."""
RULES: tuple[ConvertRule, ...] = (
    together("grpo_batch_size batch_size train_batch_size", "learn.prompts_per_step"),
    together("gradient_accumulation_steps grad_accum_steps accumulation_steps", "learn.prompts_per_step"),
    mapped(
        "k_rollouts num_generations num_samples group_size n_samples samples_per_prompt",
        "learn.samples_per_prompt",
        whole,
        "completions of one prompt, which are compared with each other: fewer of them save no memory and change what is"
        " learned",
    ),
    mapped("max_new_tokens_train max_new_tokens max_completion_length", "learn.max_new_tokens", whole),
    mapped("max_new_tokens_eval", "eval.max_new_tokens", whole),
    mapped("max_prompt_length max_prompt_tokens", "data.max_prompt_tokens", whole),
    together("lora_r lora_rank", "model.lora.r"),
    together("lora_alpha", "model.lora.alpha"),
    together("lora_target_modules target_modules", "model.lora.targets"),
    together("lora_dropout", "model.lora"),
    mapped("learning_rate lr grpo_lr grpo_learning_rate", "learn.lr", real),
    mapped("weight_decay", "learn.optimizer.weight_decay", real),
    mapped("max_grad_norm grad_clip", "learn.max_grad_norm", norm),
    mapped("temperature", "learn.sampling.temperature", number),
    mapped("top_p", "learn.sampling.top_p", real),
    mapped("top_k", "learn.sampling.top_k", every),
    mapped("kl_coef kl_beta beta", "learn.kl.coef", real),
    together("clip_eps eps_clip epsilon clip_range", "learn.clip.low"),
    mapped("max_steps num_steps grpo_steps total_steps", "learn.steps", positive),
    mapped("seed", "learn.seed", whole),
    mapped("model_name model_path model_name_or_path base_model", "model.path", text),
    mapped("train_file data_path dataset_name train_data", "data.train", text),
    mapped("eval_file eval_data test_file", "data.eval", text),
    mapped("eval_every eval_steps", "observe.eval_every", every),
    mapped("save_every save_steps", "observe.checkpoint_every", every),
    mapped("output_dir save_dir", "observe.dir", text),
    automatic(
        "device_batch_size micro_batch_size",
        "follows from the token budget; the gradient is the same",
        "run.token_budget",
    ),
    automatic(
        "gradient_checkpointing",
        "Trimtab recomputes activations where memory is short, the cheapest for their size first",
        "run.checkpoint_activations",
    ),
    automatic("device", "the first CUDA device, or the CPU", "run.device"),
    *each(automatic, "bf16 dtype torch_dtype", "bfloat16 with float32 masters on a GPU", "model.dtype"),
    *SFT_CONSTANTS,
)


def settle(sheet: Sheet) -> None:
    batch, steps = sheet.read("grpo_batch_size", whole), sheet.read("gradient_accumulation_steps", whole, 1)
    if batch is not None and batch > 0 and steps > 0:
        names = ("grpo_batch_size", "gradient_accumulation_steps")
        note = f"{batch} × {steps} prompts in an optimizer step; the token budget decides how they are split"
        sheet.put("learn.prompts_per_step", batch * steps, *names, note=note)
    elif sheet.given("gradient_accumulation_steps"):
        sheet.refuse("gradient_accumulation_steps", "multiplies a batch size that is not given: learn.prompts_per_step")
    adapters(sheet, "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
    if "model.lora.r" in sheet.keys:
        sheet.say("lora_r", "its memory is small: halving it saves about 1 % on a 7B model")
    clip(sheet, "clip_eps")


def spelling(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


FRAMEWORK = Framework(
    kind="script",
    title="a script",
    about="Constants at the top of a GRPO script of one's own, in Python or shell, in capitals or not.",
    rules=RULES,
    defaults={},
    settle=settle,
    spelling=spelling,
    dashes="",
)
