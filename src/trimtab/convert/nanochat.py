"""nanochat: `scripts.chat_rl`, its flags or the variables that guides set for them. It learns GSM8K, one way."""

from __future__ import annotations

from trimtab.convert.common import GSM8K_ROWS
from trimtab.convert.devices import DEVICES
from trimtab.convert.rules import (
    ConvertRule,
    automatic,
    each,
    every,
    mapped,
    number,
    text,
    together,
    unsupported,
    whole,
)
from trimtab.convert.sheet import Framework, Sheet

DEFAULTS = {
    "device_batch_size": 8,
    "examples_per_step": 16,
    "num_samples": 16,
    "max_new_tokens": 256,
    "top_k": 50,
    "num_epochs": 1,
    "eval_every": 60,
    "eval_examples": 400,
    "save_every": 60,
}
RULES: tuple[ConvertRule, ...] = (
    together("examples_per_step", "learn.prompts_per_step"),
    together("num_samples", "learn.samples_per_prompt"),
    together("num_epochs", "learn.steps"),
    mapped("max_new_tokens", "learn.max_new_tokens", whole),
    mapped("temperature", "learn.sampling.temperature", number),
    mapped("top_k", "learn.sampling.top_k", every),
    together("eval_every", "observe.eval_every"),
    together("eval_examples", "eval.limit"),
    mapped("save_every", "observe.checkpoint_every", every),
    automatic(
        "device_batch_size",
        "in nanochat it limits memory, divides the loss and sets the samples of an evaluation; in Trimtab the token "
        "budget limits memory and does not change the loss",
        "run.token_budget",
    ),
    mapped("weight_decay", "learn.optimizer.weight_decay", number),
    together("run", "observe.wandb"),
    automatic("device_type", "the first CUDA device, or the CPU", "run.device"),
    automatic("dtype", "bfloat16 with float32 masters on a GPU", "model.dtype"),
    *each(automatic, "num_gpus nproc_per_node", DEVICES, "run.devices"),
    *each(
        unsupported,
        "model_tag model_step source",
        "names a nanochat checkpoint: export it as a Hugging Face folder and name that",
    ),
    *each(
        unsupported,
        "matrix_lr embedding_lr unembedding_lr",
        "learning rates of Muon and its parameter groups; Trimtab has AdamW with one learn.lr (1e-6 to 1e-5 is usual)",
    ),
    unsupported("init_lr_frac", "the rate starts at learn.lr and falls to 0"),
)


def settle(sheet: Sheet) -> None:
    _sizes(sheet)
    sheet.put("learn.algorithm", "reinforce")
    sheet.put("learn.advantage", "group_mean")
    sheet.put("learn.schedule.kind", "linear")
    sheet.put("learn.max_grad_norm", None)
    sheet.put("data.train", "openai/gsm8k:main")
    sheet.put("data.eval", "openai/gsm8k:main")
    sheet.put("data.prompt", "question")
    sheet.put("reward.0.fn", "number_match")
    sheet.put("reward.0.args", {"strict": True})
    sheet.put("eval.sampling.temperature", 1.0)
    sheet.put("eval.sampling.top_k", 50)
    name = sheet.read("run", text, "dummy")
    if name == "dummy":
        sheet.refuse("run", "dummy turns W&B off, which is Trimtab's default", "dead")
    else:
        sheet.put(
            "observe.wandb", "nanochat-rl", "run", note="the name of the project; the run has the name of its folder"
        )
    sheet.need(
        "model.path", "the model to train: nanochat's checkpoint exported as a Hugging Face folder, or any other"
    )


def _sizes(sheet: Sheet) -> None:
    prompts = sheet.read("examples_per_step", whole, 16)
    samples = sheet.read("num_samples", whole, 16)
    rows_at_once = sheet.read("device_batch_size", whole, 8)
    sheet.put(
        "learn.prompts_per_step",
        prompts,
        "examples_per_step",
        note="it changes the memory need neither in nanochat nor in Trimtab",
    )
    sheet.put("learn.samples_per_prompt", samples, "num_samples")
    if prompts > 0:
        epochs = sheet.read("num_epochs", whole, 1)
        steps = GSM8K_ROWS // prompts * epochs
        sheet.put(
            "learn.steps", steps, "num_epochs", "examples_per_step", note=f"{GSM8K_ROWS} rows // {prompts} × {epochs}"
        )
    if rows_at_once > 0 and samples % rows_at_once:
        kept = samples // rows_at_once * rows_at_once
        happens = f"silently trains on {kept} samples" if kept else "fails"
        sheet.say(
            "num_samples", f"with device_batch_size {rows_at_once} nanochat {happens}; Trimtab trains on all {samples}"
        )
    if rows_at_once > 0:
        sheet.put("eval.samples_per_prompt", rows_at_once)
    if sheet.line("eval_every"):
        sheet.put("observe.eval_every", sheet.read("eval_every", whole, 60), "eval_every")
    if sheet.line("eval_examples"):
        sheet.put("eval.limit", sheet.read("eval_examples", whole, 400), "eval_examples")


def spelling(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


FRAMEWORK = Framework(
    kind="nanochat",
    title="nanochat",
    about="The flags of `scripts.chat_rl`, or variables of the same names, in capitals or not: `DEVICE_BATCH_SIZE=8`.",
    rules=RULES,
    defaults=DEFAULTS,
    settle=settle,
    spelling=spelling,
)
