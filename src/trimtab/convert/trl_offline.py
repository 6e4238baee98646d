"""TRL's SFTConfig and RewardConfig, for `trimtab sft` and `trimtab reward-model`: what they share, and what each has alone."""

from __future__ import annotations

from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.sft import SftConfig
from trimtab.convert.common import choice, optimizer, processes
from trimtab.convert.rules import (
    ConvertRule,
    automatic,
    dead,
    each,
    mapped,
    number,
    positive,
    real,
    some,
    text,
    together,
    unsupported,
    whole,
    yes,
)
from trimtab.convert.sheet import Framework, Sheet
from trimtab.convert.trl_common import (
    NEWEST,
    TRAINER_DEFAULTS,
    logs,
    lora,
    put_period,
    rates,
    spelling,
    text_as_it_is,
)
from trimtab.convert.trl_table import RULES as TABLE
from trimtab.convert.versions import OldDefault

FROM_TABLE = (
    "model_name_or_path trust_remote_code learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm "
    "lr_scheduler_type lr_scheduler_kwargs lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.min_lr "
    "lr_scheduler_kwargs.min_lr_ratio lr_scheduler_kwargs.* warmup_steps warmup_ratio seed use_peft lora_r lora_alpha "
    "lora_target_modules lora_dropout dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming "
    "eval_strategy eval_steps eval_on_start output_dir save_steps save_total_limit save_strategy save_only_model "
    "resume_from_checkpoint logging_steps logging_strategy logging_first_step report_to project run_name disable_tqdm log_level "
    "push_to_hub hub_model_id hub_strategy hub_token gradient_checkpointing gradient_checkpointing_kwargs "
    "gradient_checkpointing_kwargs.* use_liger_kernel liger_kernel_config liger_kernel_config.* bf16 dtype fp16 tf32 "
    "attn_implementation torch_compile dataset_num_proc dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor "
    "torch_empty_cache_steps pad_to_multiple_of optim optim_args deepspeed deepspeed.* fsdp fsdp_config fsdp_config.* "
    "accelerator_config accelerator_config.* ddp_find_unused_parameters full_determinism data_seed use_cpu num_processes "
    "disable_dropout do_train do_eval model_revision load_in_4bit load_in_8bit use_bnb_nested_quant use_rslora use_dora "
    "lora_modules_to_save lora_target_parameters lora_bias lora_task_type task_type router_aux_loss_coef model_init_kwargs "
    "model_init_kwargs.* accelerate_config config quantization_config quantization_config.*"
)
"""Rules of GRPOConfig's table that hold here too."""
SHARED: tuple[ConvertRule, ...] = (
    *(rule for rule in TABLE if rule.name in FROM_TABLE.split()),
    together("max_steps", "learn.steps"),
    mapped("num_train_epochs", "learn.epochs", number),
    automatic("load_best_model_at_end metric_for_best_model", "Trimtab keeps the best checkpoint by evaluation"),
    automatic("per_device_eval_batch_size", "Trimtab packs evaluation up to a token budget", "run.score_token_budget"),
    automatic("remove_unused_columns", "Trimtab reads only the columns that the config names"),
    automatic("activation_offloading", "Trimtab does it if memory is short", "run.offload.activations"),
    dead("shuffle_dataset", "rows are drawn in an order that depends on learn.seed, as in Trimtab: data.shuffle"),
    dead("auto_find_batch_size", "Trimtab recovers from running out of memory, with the same gradient"),
    *each(
        unsupported,
        "chat_template_path chat_template eos_token pad_token",
        "put the template and the tokens into a tokenizer's folder and name it: model.tokenizer",
    ),
    unsupported("label_smoothing_factor", "Trimtab uses the standard loss"),
    unsupported("group_by_length", "Trimtab pads nothing, so it needs no grouping by length"),
)
SFT_RULES: tuple[ConvertRule, ...] = (
    *SHARED,
    together("per_device_train_batch_size", "learn.sequences_per_step", "counted in examples, as in Trimtab"),
    together("gradient_accumulation_steps", "learn.sequences_per_step"),
    mapped(
        "max_length max_seq_length",
        "learn.max_tokens",
        some(positive),
        "TRL truncates longer examples; Trimtab leaves them out and counts them",
    ),
    mapped("dataset_text_field", "data.text", text),
    together("assistant_only_loss", "learn.loss_on"),
    together("completion_only_loss", "learn.loss_on"),
    together("packing", "learn.sequences_per_step"),
    automatic("padding_free", "always on: Trimtab pads nothing"),
    *each(
        automatic,
        "packing_strategy eval_packing",
        "Trimtab fills micro-batches up to a token budget",
        "run.token_budget",
    ),
    together("loss_type", "learn.aggregate", "every learned token of a step has the same weight, as in Trimtab"),
    unsupported("truncation_mode", "examples are never cut: learn.max_tokens leaves longer ones out"),
    unsupported("neftune_noise_alpha", "Trimtab adds no noise to embeddings"),
    *each(unsupported, "dataset_kwargs dataset_kwargs.*", "write the rows as docs/sft.md shows them"),
)
REWARD_RULES: tuple[ConvertRule, ...] = (
    *SHARED,
    together("per_device_train_batch_size", "learn.pairs_per_step", "counted in pairs, as in Trimtab"),
    together("gradient_accumulation_steps", "learn.pairs_per_step"),
    mapped("max_length", "learn.max_tokens", some(positive), "longer pairs are left out, as in Trimtab"),
    mapped("center_rewards_coefficient", "learn.center", some(real)),
)
_USUAL = {**TRAINER_DEFAULTS, "max_length": 1024}
SFT_DEFAULTS = {**_USUAL, "learning_rate": 2e-5, "loss_type": "nll"}
REWARD_DEFAULTS = {**_USUAL, "learning_rate": 1e-4}
REWARD_OLD_DEFAULTS = (OldDefault("0.24", "learning_rate", 5e-5),)
"""From sft_config.py and reward_config.py of every release since 0.15."""


def settle_sft(sheet: Sheet) -> None:
    examples = _sizes(sheet, "learn.sequences_per_step", "examples")
    if sheet.read("packing", yes, False):
        _packed(sheet, examples)
    else:
        sheet.refuse("packing", "off: TRL counts examples, as Trimtab does", "dead")
    choice(
        sheet, "loss_type", ("nll", "chunked_nll"), {"dft": "Write --loss_type nll after it to convert the rest"}, "nll"
    )
    sheet.put("learn.aggregate", "token_mean", "loss_type")
    _learned(sheet)
    _settle(sheet)


def settle_reward(sheet: Sheet) -> None:
    _sizes(sheet, "learn.pairs_per_step", "pairs")
    sheet.put("learn.normalize", False)
    sheet.need("data.margin", "write margin if the rows have such a column: TRL finds it by itself", False)
    _settle(sheet)


def _settle(sheet: Sheet) -> None:
    for name, key in (("max_steps", "learn.steps"), ("save_steps", "observe.checkpoint_every")):
        steps = sheet.read(name, whole)
        if steps is not None and steps > 0:
            put_period(sheet, key, name, steps, 1)
        elif steps is not None:
            sheet.refuse(name, "has no effect: it is not a number of steps", "dead")
    if "learn.steps" in sheet.keys:
        sheet.keys.pop("learn.epochs", None)
        sheet.refuse("num_train_epochs", "max_steps wins over it", "dead")
    rates(sheet, sheet.defaults["learning_rate"])
    kind = sheet.keys.get("learn.schedule.kind")
    if kind is not None and kind.value != "constant" and "learn.schedule.final" not in sheet.keys:
        sheet.put("learn.schedule.final", 0.0, "lr_scheduler_type")
    optimizer(sheet, "optim")
    _data(sheet)
    logs(sheet)
    lora(sheet)


def _sizes(sheet: Sheet, key: str, what: str) -> int:
    devices = processes(sheet)
    per_device = sheet.read("per_device_train_batch_size", whole, 8)
    accumulated = sheet.read("gradient_accumulation_steps", whole, 1)
    total = per_device * accumulated * devices
    note = f"{per_device} × {accumulated} × {devices} process{'es' * (devices > 1)} = {total} {what}"
    note += ". If several processes ran, multiply by their number" if devices == 1 else ""
    sheet.put(key, total, "per_device_train_batch_size", "gradient_accumulation_steps", note=note)
    return int(total)


def _packed(sheet: Sheet, rows: int) -> None:
    """TRL counts rows that are filled up with examples; how many those are, only the data say."""
    tokens = sheet.read("max_length", whole, 1024)
    sheet.keys.pop("learn.sequences_per_step", None)
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "packing"):
        sheet.refuse(name, f"{rows} rows of {tokens} tokens, filled with examples: write learn.sequences_per_step")
    what = f"{rows * tokens} tokens / the mean length of an example, as TRL counts rows filled with examples (now 64)"
    sheet.need("learn.sequences_per_step", what, False)


def _learned(sheet: Sheet) -> None:
    """Which tokens are learned: TRL looks at the columns unless it is told."""
    only, completion = "assistant_only_loss", "completion_only_loss"
    if sheet.read(only, yes, False):
        sheet.put("learn.loss_on", "assistant", only)
        note = "only rows with messages have assistant turns, and the chat template renders those"
        sheet.put("data.chat_template", "auto", only, note=note)
        return
    if sheet.read(completion, yes) is not None:
        whole_rows = not sheet.read(completion, yes)
        sheet.put("learn.loss_on", "all" if whole_rows else "assistant", completion)
    else:
        sheet.need(
            "learn.loss_on",
            "write all if the rows hold messages, because TRL then trains on every token. Keep assistant if they hold "
            "prompts and completions",
            False,
        )
    sheet.refuse(only, "off: completion_only_loss decides", "dead")


def _data(sheet: Sheet) -> None:
    name, part = sheet.read("dataset_name", text), sheet.read("dataset_config", text)
    if name is not None:
        sheet.put("data.train", f"{name}:{part}" if part else name, "dataset_name", "dataset_config")
    else:
        sheet.refuse("dataset_config", "has no effect without a data set", "dead")
    if "data.chat_template" not in sheet.keys:
        text_as_it_is(sheet)
    if sheet.read("eval_strategy", text, "no") == "no":
        for flag in ("eval_steps", "dataset_test_split"):
            sheet.refuse(flag, "has no effect while eval_strategy is no", "dead")
        sheet.refuse("eval_strategy", "no evaluation set is Trimtab's default", "dead")
        sheet.keys.pop("data.eval_split", None)
        return
    if name is not None:
        sheet.put("data.eval", sheet.keys["data.train"].value, "eval_strategy")
    if sheet.read("eval_strategy", text) == "epoch":
        sheet.refuse("eval_strategy", "Trimtab evaluates by steps: write observe.eval_every")
        return
    steps = sheet.read("eval_steps", whole, 10)
    note = "" if sheet.given("eval_steps") else "TRL evaluates as often as it logs, every 10 steps"
    sheet.put("observe.eval_every", steps, "eval_strategy", "eval_steps", note=note)


SFT = Framework(
    kind="trl-sft",
    title="TRL",
    about="`SFTConfig`, and flags of `trl sft`. The config is for `trimtab sft`.",
    rules=SFT_RULES,
    defaults=SFT_DEFAULTS,
    settle=settle_sft,
    spelling=spelling,
    reads="SFTConfig",
    schema=SftConfig,
    newest=NEWEST,
    oldest="0.15.0",
)
REWARD = Framework(
    kind="trl-reward",
    title="TRL",
    about="`RewardConfig`, and flags of `trl reward`. The config is for `trimtab reward-model`.",
    rules=REWARD_RULES,
    defaults=REWARD_DEFAULTS,
    settle=settle_reward,
    spelling=spelling,
    reads="RewardConfig",
    schema=RewardModelConfig,
    newest=NEWEST,
    oldest="0.15.0",
    was=REWARD_OLD_DEFAULTS,
)
