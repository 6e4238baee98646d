"""What other frameworks and scripts call our keys, so that an unknown key is answered with ours.

`convert` reads whole commands and scripts of such frameworks by tables of its own; a test compares those of scripts and of TRL
with these names.
"""

from __future__ import annotations

SAME = {
    "learn.prompts_per_step": "grpo_batch_size batch_size train_batch_size gradient_accumulation_steps grad_accum_steps "
    "accumulation_steps per_device_train_batch_size generation_batch_size",
    "learn.samples_per_prompt": "k_rollouts num_generations num_samples group_size n_samples",
    "learn.max_new_tokens": "max_new_tokens_train max_completion_length",
    "eval.max_new_tokens": "max_new_tokens_eval",
    "data.max_prompt_tokens": "max_prompt_length",
    "model.lora.r": "lora_r lora_rank",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "lora_target_modules target_modules",
    "model.lora": "lora_dropout use_peft",
    "learn.lr": "learning_rate grpo_lr grpo_learning_rate",
    "learn.max_grad_norm": "grad_clip",
    "learn.kl.coef": "kl_coef kl_beta beta",
    "learn.clip.low": "clip_eps eps_clip epsilon clip_range",
    "learn.steps": "max_steps num_steps grpo_steps total_steps num_train_epochs",
    "model.path": "model_name model_path model_name_or_path base_model",
    "data.train": "train_file data_path dataset_name train_data dataset_config",
    "data.eval": "eval_file eval_data test_file eval_strategy",
    "observe.eval_every": "eval_steps",
    "observe.checkpoint_every": "save_every save_steps",
    "observe.dir": "output_dir save_dir",
    "learn.updates_per_step": "steps_per_generation",
    "learn.epochs_per_step": "num_iterations",
    "learn.optimizer.beta1": "adam_beta1",
    "learn.optimizer.beta2": "adam_beta2",
    "learn.optimizer.eps": "adam_epsilon",
    "learn.schedule.kind": "lr_scheduler_type",
    "learn.schedule.final": "lr_scheduler_kwargs",
    "learn.schedule.warmup_steps": "warmup_ratio",
    "learn.kl.corrected": "use_bias_correction_kl",
    "learn.clip.high": "epsilon_high",
    "learn.clip.dual": "delta",
    "learn.aggregate": "loss_type",
    "learn.loss": "importance_sampling_level",
    "learn.advantage": "scale_rewards",
    "learn.mask_truncated": "mask_truncated_completions",
    "learn.importance.level": "vllm_importance_sampling_correction",
    "learn.importance.mode": "vllm_importance_sampling_mode",
    "learn.importance.cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "data.train_split": "dataset_train_split",
    "data.eval_split": "dataset_test_split",
    "data.shuffle": "shuffle_dataset",
    "reward.0.fn": "reward_funcs reward_model_name_or_path",
    "reward.0.weight": "reward_weights",
    "eval.samples_per_prompt": "num_generations_eval",
    "observe.keep_checkpoints": "save_total_limit",
    "observe.wandb": "report_to project",
    "learn.optimizer.states": "optim",
}
"""Key: names of a setting that is the user's here, too."""
AUTOMATIC = {
    "run.token_budget": "device_batch_size micro_batch_size",
    "run.checkpoint_activations": "gradient_checkpointing gradient_checkpointing_kwargs",
    "model.dtype": "bf16 torch_dtype",
    "observe.checkpoint_every": "save_strategy",
    "eval.part": "load_best_model_at_end metric_for_best_model",
    "observe.samples_every": "log_completions num_completions_to_print log_unique_prompts",
    "observe.dir": "run_name",
    "run.engine": "use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout "
    "vllm_group_port vllm_model_impl",
    "run.rollout.kv_memory": "vllm_gpu_memory_utilization",
    "run.rollout.tensor_parallel": "vllm_tensor_parallel_size",
    "data.max_prompt_tokens": "vllm_max_model_length vllm_max_model_len",
    "run.rollout.lend_memory": "vllm_enable_sleep_mode",
    "run.rollout.max_sequences": "use_transformers_continuous_batching use_transformers_paged per_device_eval_batch_size",
    "run.rollout.page_tokens": "cache_implementation",
    "run.kernels": "use_liger_kernel liger_kernel_config",
    "run.logprob_chunk": "use_liger_loss",
    "learn.optimizer.states": "optim_args",
    "learn.seed": "full_determinism data_seed",
    "run.device": "use_cpu",
    "run.devices": "num_processes",
    "run.shard": "deepspeed fsdp fsdp_config",
}
"""Key: names of a setting that Trimtab chooses; the key pins it."""


def our_keys(name: str) -> list[tuple[str, bool]]:
    """Keys that others call by this name, each with whether Trimtab chooses its value."""
    return [
        (key, automatic)
        for table, automatic in ((SAME, False), (AUTOMATIC, True))
        for key, names in table.items()
        if name in names.split() and name != key.split(".")[-1]
    ]
