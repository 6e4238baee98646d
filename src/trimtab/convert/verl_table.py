"""verl's keys of learning, data, rewards and the trainer, one rule each. `A.` stands for `actor_rollout_ref.`."""

from __future__ import annotations

from trimtab.convert.devices import BALANCED, DEVICES, NODES, OWN_RANKS, ROWS
from trimtab.convert.rules import (
    CRITIC_LIKE_POLICY,
    NORMALISED,
    REWARD_MODEL,
    SCORED,
    SHARED,
    ConvertRule,
    automatic,
    dead,
    each,
    every,
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

CRITIC_KEYS: tuple[ConvertRule, ...] = (
    together(
        "critic.model.path",
        "learn.critic.path",
        "must be a language model with the policy's tokenizer; Trimtab adds a new value head, which predicts 0 at first",
    ),
    together("critic.optim.lr", "learn.critic.lr"),
    together("critic.cliprange_value", "learn.critic.clip"),
    together(
        "trainer.critic_warmup",
        "learn.critic.warmup_steps",
        "verl counts steps from 1, and its policy already learns in step critic_warmup, so learn.critic.warmup_steps is"
        " one less",
    ),
    together("algorithm.gamma", "learn.critic.gamma"),
    together("algorithm.lam", "learn.critic.lam", f"as in Trimtab, {NORMALISED}"),
    automatic("critic.enable", "only PPO has a critic", "learn.algorithm"),
    automatic(
        "critic.ppo_micro_batch_size_per_gpu critic.ppo_micro_batch_size",
        "follows from the token budget; the gradient is the same",
        "run.token_budget",
    ),
    *each(
        automatic,
        "critic.ppo_infer_micro_batch_size_per_gpu critic.ppo_infer_max_token_len_per_gpu",
        "passes without gradients have their own token budget",
        "run.score_token_budget",
    ),
    automatic(
        "critic.forward_micro_batch_size_per_gpu critic.forward_micro_batch_size",
        "passes without gradients have their own token budget",
        "run.score_token_budget",
    ),
    automatic(
        "critic.ppo_max_token_len_per_gpu",
        "Trimtab takes the limit from the memory plan, for policy and critic",
        "run.token_budget",
    ),
    automatic(
        "critic.forward_max_token_len_per_gpu",
        "passes without gradients have their own token budget",
        "run.score_token_budget",
    ),
    automatic(
        "critic.use_dynamic_bsz", "always on: Trimtab fills micro-batches up to a token budget", "run.token_budget"
    ),
    *each(
        automatic,
        "critic.model.enable_gradient_checkpointing critic.model.enable_activation_offload",
        CRITIC_LIKE_POLICY,
        "run.checkpoint_activations",
    ),
    automatic("critic.model.use_remove_padding", "always on: Trimtab pads nothing"),
    automatic(
        "critic.model.fsdp_config.param_offload critic.fsdp.param_offload",
        "each device holds weights of policy and critic; `trimtab plan` says whether they fit",
    ),
    automatic(
        "critic.model.fsdp_config.optimizer_offload critic.fsdp.optimizer_offload",
        "Trimtab streams it from host memory where device memory is short",
        "run.offload.optimizer",
    ),
    automatic("trainer.max_critic_ckpt_to_keep", "the critic is in every checkpoint", "observe.keep_checkpoints"),
    automatic("critic.model.tokenizer_path", "the critic uses the policy's tokenizer", "model.tokenizer"),
    automatic("critic.model.trust_remote_code", "the same as for the policy", "model.trust_remote_code"),
    *each(
        automatic,
        "critic.model.lora_rank critic.model.lora_alpha critic.model.target_modules critic.model.lora.*",
        "the critic has adapters if the policy has",
        "model.lora",
    ),
    *each(
        automatic,
        "critic.strategy critic.megatron.* critic.veomni.* critic.torchtitan.* critic.fsdp.* critic.engine.* "
        "critic.model.fsdp_config.* critic.fsdp.grad_offload critic.model.fsdp_config.grad_offload",
        OWN_RANKS,
        "run.shard",
    ),
    *each(
        automatic,
        "critic.checkpoint.* critic.profiler.* critic.rollout_n critic.shuffle critic.data_loader_seed "
        "critic.model.use_liger critic.model.use_shm",
        CRITIC_LIKE_POLICY,
    ),
    *each(
        unsupported,
        "critic.ppo_mini_batch_size critic.ppo_epochs critic.loss_agg_mode critic.loss_scale_factor",
        "the critic is updated when the policy is, on the same samples: see learn.updates_per_step, learn.epochs_per_step "
        "and learn.aggregate",
    ),
    unsupported("critic.grad_clip", SHARED),
    unsupported("critic.optim.*", SHARED),
    automatic("critic.ulysses_sequence_parallel_size", ROWS, "run.sequence_parallel"),
    unsupported("critic.*", "see learn.critic for what Trimtab offers"),
)
"""What is said of a critic."""
REWARD_MODEL_KEYS: tuple[ConvertRule, ...] = (
    together("reward.reward_model.enable reward_model.enable", "reward.0.fn"),
    together("reward.reward_model.model_path reward_model.model.path", "reward.0.fn", REWARD_MODEL),
    automatic("reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size", SCORED, "run.score_token_budget"),
    automatic("reward_model.use_dynamic_bsz", SCORED, "run.score_token_budget"),
    automatic("reward_model.forward_max_token_len_per_gpu", SCORED, "run.score_token_budget"),
    dead(
        "reward_model.forward_micro_batch_size_per_gpu",
        f"verl has no such key: the cap is reward_model.forward_max_token_len_per_gpu. {SCORED[0].upper()}{SCORED[1:]}",
    ),
    automatic("reward_model.model.use_remove_padding", SCORED),
    unsupported(
        "reward_model.ulysses_sequence_parallel_size", "a reward model reads whole conversations on each device"
    ),
    *each(unsupported, "reward_model.mini_batch_size reward_model.* reward.reward_model.*", SCORED),
)
"""What needs a reward model."""

LEARN_RULES: tuple[ConvertRule, ...] = (
    # what to learn
    mapped("A.model.path", "model.path", text),
    *each(mapped, "A.model.tokenizer_path data.tokenizer", "model.tokenizer", some(text)),
    *each(mapped, "A.model.trust_remote_code data.trust_remote_code", "model.trust_remote_code", yes),
    together("A.model.lora_rank A.model.lora.rank", "model.lora.r"),
    together("A.model.lora_alpha A.model.lora.alpha", "model.lora.alpha"),
    together("A.model.target_modules A.model.lora.target_modules", "model.lora.targets"),
    together("algorithm.adv_estimator", "learn.algorithm"),
    together("algorithm.norm_adv_by_std_in_grpo", "learn.advantage"),
    together("A.actor.policy_loss.loss_mode", "learn.loss"),
    together("A.actor.loss_agg_mode", "learn.aggregate"),
    together(
        "data.train_batch_size | rollout.batch_size", "learn.prompts_per_step", "counted in prompts, as in Trimtab"
    ),
    together("A.rollout.n | generation.group_size", "learn.samples_per_prompt"),
    together(
        "A.actor.ppo_mini_batch_size | training.batch_size",
        "learn.updates_per_step",
        "counted in prompts, as in Trimtab",
    ),
    mapped(
        "A.actor.ppo_epochs | training.num_epochs", "learn.epochs_per_step", whole, "passes over one batch of samples"
    ),
    mapped("trainer.total_training_steps", "learn.steps", positive),
    together(
        "trainer.total_epochs",
        "learn.steps",
        "counts passes over the data, and convert does not know the number of rows",
    ),
    mapped(
        "data.max_response_length A.rollout.response_length | generation.max_new_tokens", "learn.max_new_tokens", whole
    ),
    mapped(
        "data.max_prompt_length A.rollout.prompt_length",
        "data.max_prompt_tokens",
        whole,
        "Trimtab skips and counts longer prompts; it never truncates them",
    ),
    mapped("A.rollout.temperature | generation.temperature", "learn.sampling.temperature", number),
    mapped("A.rollout.top_p | generation.top_p", "learn.sampling.top_p", real),
    mapped(
        "A.rollout.top_k | generation.top_k", "learn.sampling.top_k", every, "-1 in verl is 0 in Trimtab: all tokens"
    ),
    together("A.actor.clip_ratio", "learn.clip.low"),
    together("A.actor.clip_ratio_low", "learn.clip.low"),
    together("A.actor.clip_ratio_high", "learn.clip.high"),
    together("A.actor.clip_ratio_c", "learn.clip.dual"),
    mapped("A.actor.entropy_coeff", "learn.entropy_coef", real),
    together("A.actor.use_kl_loss", "learn.kl.where"),
    together("A.actor.kl_loss_coef", "learn.kl.coef"),
    together("A.actor.kl_loss_type", "learn.kl.estimator"),
    together("algorithm.use_kl_in_reward", "learn.kl.where"),
    together("algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.coef", "learn.kl.coef"),
    together("algorithm.kl_penalty", "learn.kl.estimator"),
    together("algorithm.kl_ctrl.type", "learn.kl.target"),
    together("algorithm.kl_ctrl.target_kl", "learn.kl.target"),
    together("algorithm.kl_ctrl.horizon", "learn.kl.horizon"),
    mapped("A.actor.optim.lr", "learn.lr", real),
    mapped("A.actor.optim.weight_decay", "learn.optimizer.weight_decay", real),
    together("A.actor.optim.optimizer", "learn.optimizer.states"),
    automatic(
        "A.actor.optim.optimizer_impl", "Trimtab has AdamW only, with 32-bit or 8-bit moments", "learn.optimizer.states"
    ),
    together("A.actor.optim.betas", "learn.optimizer.beta1"),
    mapped("A.actor.optim.clip_grad A.actor.grad_clip", "learn.max_grad_norm", norm),
    together("A.actor.optim.lr_scheduler_type A.actor.optim.warmup_style", "learn.schedule.kind"),
    together("A.actor.optim.lr_warmup_steps", "learn.schedule.warmup_steps"),
    together("A.actor.optim.lr_warmup_steps_ratio", "learn.schedule.warmup_steps"),
    together("A.actor.optim.min_lr_ratio", "learn.schedule.final"),
    mapped("algorithm.filter_groups.enable", "learn.dynamic_sampling.enabled", yes),
    together("algorithm.filter_groups.max_num_gen_batches", "learn.dynamic_sampling.max_refills"),
    automatic("algorithm.filter_groups.metric", "Trimtab drops groups whose rewards are all equal"),
    together("algorithm.rollout_correction.rollout_is", "learn.importance.level"),
    together("algorithm.rollout_correction.rollout_is_threshold A.actor.tis_imp_ratio_cap", "learn.importance.cap"),
    mapped(
        "algorithm.rollout_correction.bypass_mode",
        "learn.old_logprobs",
        lambda value: "engine" if yes(value) else "trainer",
        "with one update per step Trimtab needs no old log-probs",
    ),
    together(
        "reward.reward_kwargs.overlong_buffer_cfg.enable reward_model.reward_kwargs.overlong_buffer_cfg.enable "
        "reward_model.overlong_buffer.enable",
        "learn.overlong.buffer",
    ),
    together(
        "reward.reward_kwargs.overlong_buffer_cfg.len reward_model.reward_kwargs.overlong_buffer_cfg.len "
        "reward_model.overlong_buffer.len",
        "learn.overlong.buffer",
    ),
    together(
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor "
        "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor reward_model.overlong_buffer.penalty_factor",
        "learn.overlong.penalty",
    ),
    # data, reward, evaluation
    together("data.train_files", "data.train"),
    together("data.val_files", "data.eval"),
    mapped("data.prompt_key", "data.prompt", text),
    mapped("data.shuffle", "data.shuffle", yes),
    *each(mapped, "data.seed trainer.seed", "learn.seed", some(whole)),
    mapped("data.train_max_samples", "data.limit", positive),
    mapped("data.val_max_samples", "eval.limit", positive),
    automatic(
        "data.filter_overlong_prompts",
        "always on: Trimtab skips and counts prompts that are too long",
        "data.max_prompt_tokens",
    ),
    automatic("data.truncation", "Trimtab never truncates prompts", "data.max_prompt_tokens"),
    automatic("data.reward_fn_key", "every column of the data reaches the rewards by its name"),
    automatic(
        "data.gen_batch_size",
        "dynamic sampling draws as many prompts as it needs",
        "learn.dynamic_sampling.max_refills",
    ),
    automatic("data.val_batch_size", "evaluation runs as many sequences at once as fit"),
    automatic("data.dataloader_num_workers", "Trimtab tokenises prompts ahead, in a thread"),
    automatic("data.return_raw_chat", "string prompts and messages both work", "data.chat_template"),
    together("reward.custom_reward_function.path custom_reward_function.path", "reward.0.fn"),
    together("reward.custom_reward_function.name custom_reward_function.name", "reward.0.fn"),
    automatic(
        "reward.reward_manager.name reward_model.reward_manager",
        "rewards run in worker processes with a deadline",
        "run.reward_workers",
    ),
    automatic("reward.num_workers", "worker processes", "run.reward_workers"),
    unsupported("reward.sandbox_fusion.url reward_model.sandbox_fusion.url", "call the sandbox from a reward function"),
    mapped("A.rollout.val_kwargs.n", "eval.samples_per_prompt", whole),
    mapped("A.rollout.val_kwargs.temperature", "eval.sampling.temperature", number),
    mapped("A.rollout.val_kwargs.top_p", "eval.sampling.top_p", real),
    mapped("A.rollout.val_kwargs.top_k", "eval.sampling.top_k", every),
    automatic("A.rollout.val_kwargs.do_sample", "a temperature of 0 is greedy", "eval.sampling.temperature"),
    # the trainer
    mapped("trainer.test_freq", "observe.eval_every", every),
    automatic(
        "trainer.val_before_train",
        "always on: with an evaluation set, Trimtab evaluates before the first step and after the last",
    ),
    unsupported("trainer.val_only", "trimtab eval does that"),
    mapped("trainer.save_freq", "observe.checkpoint_every", every),
    mapped("trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep", "observe.keep_checkpoints", positive),
    mapped("trainer.default_local_dir", "observe.dir", text, "the run's folder"),
    unsupported("trainer.default_hdfs_dir", "copy the run's folder"),
    together("trainer.logger", "observe.wandb"),
    together("trainer.project_name", "observe.wandb"),
    automatic("trainer.experiment_name", "the run has the name of its folder", "observe.dir"),
    automatic("trainer.resume_mode", "trimtab train --resume continues from the newest checkpoint"),
    automatic("trainer.resume_from_path", "trimtab train --resume continues from the newest checkpoint"),
    automatic("trainer.nnodes", NODES, "run.devices"),
    automatic("trainer.n_gpus_per_node", DEVICES, "run.devices"),
    automatic("trainer.device", "the first CUDA device, or the CPU", "run.device"),
    automatic("trainer.balance_batch", BALANCED),
    automatic("trainer.log_val_generations", "completions are in RUN/eval/samples"),
    automatic("trainer.rollout_data_dir", "completions are in RUN/samples", "observe.samples_every"),
    automatic("trainer.use_v1", "one loop"),
    automatic("trainer.use_legacy_worker_impl", "one implementation"),
    *each(
        automatic,
        "ray_kwargs.ray_init.num_cpus ray_kwargs.ray_init.num_gpus ray_kwargs.ray_init.runtime_env.py_executable",
        "one machine needs no Ray",
    ),
)
