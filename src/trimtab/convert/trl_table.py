"""TRL's arguments, one rule each. One that takes names and values has a family too: YAML gives them key by key."""

from __future__ import annotations

from trimtab.convert.devices import DEVICES, ENGINE_CUT, OVERLAP, OWN_RANKS, PREFETCH, SHARD
from trimtab.convert.rules import (
    LIGER,
    PAIRS,
    REWARD_MODEL,
    SFT,
    ConvertRule,
    automatic,
    dead,
    each,
    mapped,
    norm,
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

ENGINE = "the native engine generates with the trainer's own weights"

GRPO_ONLY_NAMES = (
    "loss_type importance_sampling_level scale_rewards delta use_bias_correction_kl entropy_coef "
    "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_clip_min vllm_importance_sampling_cap "
    "off_policy_mask_threshold top_entropy_quantile multi_objective_aggregation "
    "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target sapo_temperature_neg "
    "sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg"
)
"""Arguments of GRPOConfig that none of TRL's other classes has."""
REWARD_MODEL_ARGUMENTS: tuple[ConvertRule, ...] = (together("reward_model_name_or_path", "reward.0.fn", REWARD_MODEL),)
"""What needs a reward model."""

RULES: tuple[ConvertRule, ...] = (
    # what to learn
    mapped("model_name_or_path", "model.path", text),
    mapped("trust_remote_code", "model.trust_remote_code", yes),
    together(
        "per_device_train_batch_size",
        "learn.prompts_per_step",
        "counted in completions, not in prompts",
    ),
    together("gradient_accumulation_steps", "learn.prompts_per_step"),
    together("generation_batch_size", "learn.prompts_per_step", "counted in completions: divided by num_generations"),
    together("steps_per_generation", "learn.updates_per_step"),
    together("num_generations", "learn.samples_per_prompt"),
    mapped("num_iterations", "learn.epochs_per_step", whole, "passes over one batch of samples"),
    together("max_steps", "learn.steps", "TRL counts optimizer steps, Trimtab batches"),
    together(
        "num_train_epochs",
        "learn.steps",
        "counts passes over the data, and convert does not know the number of rows",
    ),
    mapped("max_completion_length", "learn.max_new_tokens", whole),
    mapped(
        "max_prompt_length",
        "data.max_prompt_tokens",
        some(whole),
        "TRL truncated prompts and has removed this; Trimtab skips longer ones",
    ),
    mapped("temperature", "learn.sampling.temperature", number),
    mapped("top_p", "learn.sampling.top_p", real),
    mapped("top_k", "learn.sampling.top_k", lambda value: 0 if value is None else max(whole(value), 0)),
    mapped("min_p", "learn.sampling.min_p", some(real)),
    mapped("learning_rate", "learn.lr", real),
    mapped("weight_decay", "learn.optimizer.weight_decay", real),
    mapped("adam_beta1", "learn.optimizer.beta1", real),
    mapped("adam_beta2", "learn.optimizer.beta2", real),
    mapped("adam_epsilon", "learn.optimizer.eps", real),
    mapped("max_grad_norm", "learn.max_grad_norm", norm),
    together("lr_scheduler_type", "learn.schedule.kind"),
    together(
        "lr_scheduler_kwargs",
        "learn.schedule.final",
        "for cosine_with_min_lr: min_lr_rate, or min_lr as a fraction of the learning rate",
    ),
    together("lr_scheduler_kwargs.min_lr_rate", "learn.schedule.final"),
    together("lr_scheduler_kwargs.min_lr", "learn.schedule.final", "a learning rate: divided by learning_rate"),
    *each(
        unsupported,
        "lr_scheduler_kwargs.min_lr_ratio lr_scheduler_kwargs.*",
        "learn.schedule sets the kind, the warm-up and the final learning rate only",
    ),
    together("warmup_steps", "learn.schedule.warmup_steps"),
    together("warmup_ratio", "learn.schedule.warmup_steps"),
    mapped("beta", "learn.kl.coef", real, "both use k3 in the loss; with 0 Trimtab loads no reference model"),
    together("use_bias_correction_kl", "learn.kl.corrected"),
    together("epsilon", "learn.clip.low"),
    together("epsilon_high", "learn.clip.high"),
    mapped(
        "delta",
        "learn.clip.dual",
        some(real),
        "means the same: it limits the ratio where the advantage is negative",
    ),
    together("loss_type", "learn.aggregate"),
    together("importance_sampling_level", "learn.loss"),
    together("scale_rewards", "learn.advantage"),
    mapped("mask_truncated_completions", "learn.mask_truncated", yes),
    mapped("entropy_coef", "learn.entropy_coef", real),
    together("vllm_importance_sampling_correction", "learn.importance.level"),
    together("vllm_importance_sampling_mode", "learn.importance.mode"),
    together("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "learn.importance.cap"),
    mapped("seed", "learn.seed", whole, "the samples still differ: each framework has its own random numbers"),
    together("use_peft", "model.lora"),
    together("lora_r", "model.lora.r"),
    together("lora_alpha", "model.lora.alpha"),
    together("lora_target_modules", "model.lora.targets"),
    together("lora_dropout", "model.lora"),
    # data, reward, evaluation
    together("dataset_name", "data.train"),
    together("dataset_config", "data.train"),
    mapped("dataset_train_split", "data.train_split", text),
    mapped("dataset_test_split", "data.eval_split", text),
    mapped("shuffle_dataset", "data.shuffle", yes),
    automatic(
        "dataset_streaming streaming", "Trimtab reads all rows and checks columns and types before it loads the model"
    ),
    together("reward_funcs", "reward.0.fn"),
    together("reward_weights", "reward.0.weight"),
    together("eval_strategy", "data.eval"),
    together("eval_steps", "observe.eval_every"),
    together("num_generations_eval", "eval.samples_per_prompt"),
    automatic(
        "eval_on_start", "always on: with an evaluation set, Trimtab evaluates before the first step and after the last"
    ),
    # logs and checkpoints
    mapped("output_dir", "observe.dir", text, "the run's folder"),
    together("save_steps", "observe.checkpoint_every"),
    mapped("save_total_limit", "observe.keep_checkpoints", positive),
    automatic("save_strategy", "counts steps", "observe.checkpoint_every"),
    automatic("save_only_model", "checkpoints are always complete, so that a run can continue"),
    automatic("resume_from_checkpoint", "trimtab train --resume continues from the newest checkpoint"),
    *each(
        automatic,
        "load_best_model_at_end metric_for_best_model",
        "Trimtab keeps the best checkpoint by evaluation: trimtab export --checkpoint best",
        "eval.part",
    ),
    *each(automatic, "logging_steps logging_strategy logging_first_step", "every step is logged"),
    *each(
        automatic,
        "log_completions num_completions_to_print log_unique_prompts",
        "completions are in RUN/samples",
        "observe.samples_every",
    ),
    together("report_to", "observe.wandb"),
    together("project", "observe.wandb"),
    automatic("run_name", "the run has the name of its folder", "observe.dir"),
    *each(automatic, "disable_tqdm log_level", "the console shows one line a step"),
    *each(
        unsupported,
        "push_to_hub hub_model_id hub_strategy hub_token",
        "trimtab export writes a Hugging Face folder; upload that",
    ),
    # generation
    automatic("use_vllm", ENGINE, "run.engine"),
    automatic("vllm_mode", ENGINE, "run.engine"),
    automatic(
        "vllm_gpu_memory_utilization",
        "Trimtab gives the KV cache the memory that the plan leaves over",
        "run.rollout.kv_memory",
    ),
    automatic(
        "vllm_tensor_parallel_size",
        ENGINE_CUT,
        "run.rollout.tensor_parallel",
    ),
    automatic(
        "vllm_max_model_length vllm_max_model_len",
        "Trimtab takes the longest prompt plus the longest completion",
        "data.max_prompt_tokens",
    ),
    automatic(
        "vllm_enable_sleep_mode",
        "always on: the engine lends the KV cache's memory to the update; no weights are moved",
        "run.rollout.lend_memory",
    ),
    *each(
        automatic,
        "vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port",
        ENGINE,
        "run.engine",
    ),
    automatic("vllm_model_impl", ENGINE, "run.engine"),
    automatic(
        "use_transformers_continuous_batching use_transformers_paged",
        "always on: a finished sequence makes room for the next",
        "run.rollout.max_sequences",
    ),
    automatic("cache_implementation", "paged KV", "run.rollout.page_tokens"),
    automatic("ds3_gather_for_generation", ENGINE),
    unsupported(
        "repetition_penalty", "Trimtab applies no penalty, so that sampling and training have the same log-probs"
    ),
    *each(unsupported, "generation_kwargs generation_kwargs.*", "write the keys that Trimtab has under learn.sampling"),
    *each(unsupported, "chat_template_kwargs chat_template_kwargs.*", "the tokenizer's template is applied as it is"),
    unsupported(
        "vllm_structured_outputs_regex vllm_guided_decoding_regex",
        "Trimtab does not constrain completions; reward their form with the built-in regex",
    ),
    unsupported("max_tool_calling_iterations", "not converted: environment.max_turns is this number plus one"),
    # memory and speed
    automatic(
        "gradient_checkpointing",
        "Trimtab recomputes activations where memory is short, the cheapest for their size first",
        "run.checkpoint_activations",
    ),
    *each(
        automatic,
        "gradient_checkpointing_kwargs gradient_checkpointing_kwargs.*",
        "Trimtab's own recomputation",
        "run.checkpoint_activations",
    ),
    automatic("use_liger_kernel", LIGER, "run.kernels"),
    automatic("use_liger_loss", "logits are never held for a whole batch", "run.logprob_chunk"),
    *each(
        automatic,
        "liger_kernel_config liger_kernel_config.*",
        "run.kernels: liger uses all of Liger except its loss",
        "run.kernels",
    ),
    automatic("bf16", "bfloat16 with float32 masters on a GPU", "model.dtype"),
    automatic("dtype torch_dtype", "bfloat16 with float32 masters on a GPU", "model.dtype"),
    unsupported(
        "fp16", "write model.dtype: float16 on a GPU without bfloat16; elsewhere bfloat16 needs no loss scaling"
    ),
    automatic("tf32", "Trimtab computes float32 in full float32"),
    automatic("attn_implementation", "one attention for training and generation"),
    automatic("torch_compile", "Trimtab has its own fused kernels for known layers"),
    automatic(
        "per_device_eval_batch_size", "evaluation runs as many sequences at once as fit", "run.rollout.max_sequences"
    ),
    *each(
        automatic,
        "dataset_num_proc dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor",
        "Trimtab tokenises prompts ahead, in a thread",
    ),
    automatic("torch_empty_cache_steps", "Trimtab passes memory from phase to phase instead"),
    automatic("pad_to_multiple_of", "Trimtab pads nothing"),
    automatic("remove_unused_columns", "every column of the data reaches the rewards by its name"),
    together("optim", "learn.optimizer.states"),
    automatic("optim_args", "one AdamW: see learn.optimizer", "learn.optimizer.states"),
    *each(automatic, "deepspeed deepspeed.zero_optimization.stage fsdp", SHARD, "run.shard"),
    automatic("deepspeed.zero_optimization.overlap_comm", OVERLAP, "run.overlap"),
    automatic(
        "deepspeed.zero_optimization.offload_optimizer.device",
        "Trimtab streams it from host memory where device memory is short",
        "run.offload.optimizer",
    ),
    automatic("fsdp_config.reshard_after_forward", SHARD, "run.shard"),
    *each(automatic, "fsdp_config.forward_prefetch fsdp_config.backward_prefetch", PREFETCH),
    *each(
        automatic,
        "deepspeed.* fsdp_config fsdp_config.*",
        OWN_RANKS,
        "run.shard",
    ),
    *each(automatic, "accelerator_config accelerator_config.* ddp_find_unused_parameters", OWN_RANKS),
    *each(automatic, "full_determinism data_seed", "data order and sampling depend only on learn.seed", "learn.seed"),
    automatic("use_cpu", "the first CUDA device, or the CPU", "run.device"),
    automatic("num_processes", f"{DEVICES}. TRL's batch sizes are multiplied by this number", "run.devices"),
    dead(
        "auto_find_batch_size",
        "TRL rejects it for GRPO. Trimtab recovers from running out of memory with the same gradient",
    ),
    dead("disable_dropout", "Trimtab trains without dropout: the engine and the trainer must agree"),
    *each(dead, "do_train do_eval", "trimtab train trains; an evaluation set is evaluated"),
    # not here
    unsupported("model_revision", "download that revision into a folder and write the folder's path"),
    *each(
        unsupported,
        "load_in_4bit load_in_8bit use_bnb_nested_quant",
        "write model.base: 4bit or fp8 with model.lora: it stores the frozen weights so",
    ),
    unsupported("use_rslora", "Trimtab scales adapters by alpha / r: write alpha × sqrt(r) as model.lora.alpha"),
    *each(
        unsupported,
        "use_dora lora_modules_to_save lora_target_parameters lora_bias",
        "Trimtab trains standard LoRA adapters on linear layers",
    ),
    *each(automatic, "lora_task_type task_type", "Trimtab always trains a causal language model"),
    *each(
        unsupported,
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "the reference model stays the model before training",
    ),
    unsupported("top_entropy_quantile", "Trimtab trains on every token"),
    *each(
        unsupported,
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        "Trimtab's learn.entropy_coef is fixed",
    ),
    unsupported("multi_objective_aggregation", "Trimtab adds the weighted rewards before it computes advantages"),
    unsupported("off_policy_mask_threshold", "learn.importance with mode: mask is similar"),
    unsupported("vllm_importance_sampling_clip_min", "Trimtab limits importance weights from above only"),
    unsupported("router_aux_loss_coef", "TRL balances micro-batches, Trimtab whole steps: write learn.router_aux_coef"),
    *each(unsupported, "sapo_temperature_neg sapo_temperature_pos", "Trimtab has no SAPO loss"),
    *each(unsupported, "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", "Trimtab has no VESPO loss"),
    *each(unsupported, "model_init_kwargs model_init_kwargs.*", "write the keys that Trimtab has under model"),
    *each(unsupported, "accelerate_config config", "names a settings file: give that file with --file"),
    *each(unsupported, "tools environment_factory rollout_func", "name them in environment.tools or environment.fn"),
    *each(
        unsupported,
        "quantization_config quantization_config.*",
        "write model.base: 4bit or fp8 with model.lora: it stores the frozen weights so",
    ),
    *REWARD_MODEL_ARGUMENTS,
    *each(
        unsupported,
        "dataset_text_field dataset_kwargs dataset_kwargs.* packing packing_strategy eval_packing padding_free "
        "completion_only_loss assistant_only_loss truncation_mode",
        SFT,
    ),
    unsupported("center_rewards_coefficient", PAIRS),
    unsupported("max_length", f"{SFT}. {PAIRS[0].upper()}{PAIRS[1:]}"),
)
