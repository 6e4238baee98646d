"""OpenRLHF's flags, one rule each."""

from __future__ import annotations

from trimtab.convert.devices import (
    DEVICES,
    ENGINE_CUT,
    ENGINES,
    LAYERS,
    NODES,
    OVERLAP,
    ROWS,
    ROWS_PLAN,
    SHARD,
    SHARD_GROUP,
    TOGETHER,
)
from trimtab.convert.rules import (
    LIGER,
    NORMALISED,
    PAIRS,
    REWARD_MODEL,
    SCORED,
    SFT,
    SHARED,
    ConvertRule,
    automatic,
    dead,
    each,
    every,
    mapped,
    norm,
    number,
    pair,
    positive,
    real,
    some,
    text,
    together,
    unsupported,
    whole,
    yes,
)

CRITIC_FLAGS: tuple[ConvertRule, ...] = (
    together(
        "critic.model_name_or_path critic_pretrain",
        "learn.critic.path",
        "must be a language model with the policy's tokenizer; Trimtab adds a new value head, which predicts 0 at first",
    ),
    together("critic.adam.lr critic_learning_rate", "learn.critic.lr"),
    together(
        "critic.value_clip value_clip", "learn.critic.clip", "the default is 0.5, before version 0.8.2 it was 0.2"
    ),
    together(
        "critic.freezing_steps freezing_actor_steps",
        "learn.critic.warmup_steps",
        "-1 in OpenRLHF is 0 in Trimtab. OpenRLHF counts steps from 0, so its policy waits one step longer",
    ),
    together("algo.advantage.gamma gamma", "learn.critic.gamma"),
    together(
        "algo.advantage.lambd lambd",
        "learn.critic.lam",
        f"the default is 1. As in Trimtab, {NORMALISED}",
    ),
    automatic("critic.num_nodes critic_num_nodes", TOGETHER),
    automatic("critic.num_gpus_per_node critic_num_gpus_per_node", TOGETHER),
    automatic(
        "train.colocate_critic_reward colocate_critic_reward",
        "the critic is on the policy's devices unless run.placement gives it others",
    ),
    automatic(
        "critic.save_value_network save_value_network", "the critic is in every checkpoint; export leaves it out"
    ),
    *each(
        unsupported,
        "critic.adam.betas critic.adam.eps critic.adam.weight_decay critic.max_norm critic.optim critic.lr_scheduler "
        "critic.lr_warmup_ratio critic.min_lr_ratio critic.muon.*",
        SHARED,
    ),
)
"""What is said of a critic."""
REWARD_MODEL_FLAGS: tuple[ConvertRule, ...] = (
    together("reward.model_name_or_path reward_pretrain", "reward.0.fn", REWARD_MODEL),
    automatic("reward.num_nodes reward_num_nodes", SCORED),
    automatic("reward.num_gpus_per_node reward_num_gpus_per_node", SCORED),
    unsupported("reward.offload", SCORED),
    automatic(
        "reward.normalize_enable normalize_reward",
        "it applies the mean and deviation that a reward model stored; one of `trimtab reward-model` has them in its weights and "
        "in reward.json",
    ),
    automatic(
        "ds.value_head_prefix value_head_prefix", "names a head that Trimtab does not read: the critic gets a new head"
    ),
)
"""What needs a reward model."""
STAGE_FLAGS: tuple[ConvertRule, ...] = (
    unsupported("data.output_key output_key", SFT),
    unsupported("data.multiturn multiturn", SFT),
    unsupported("model.pretrain_mode_enable pretrain_mode", SFT),
    unsupported("data.chosen_key chosen_key", PAIRS),
    unsupported("data.rejected_key rejected_key", PAIRS),
    unsupported("model.margin_loss_enable margin_loss", PAIRS),
    unsupported("model.loss_type", PAIRS),
)
"""Flags of `openrlhf.cli.train_sft` and `train_rm`."""

RULES: tuple[ConvertRule, ...] = (
    # what to learn
    mapped("actor.model_name_or_path pretrain", "model.path", text),
    together("algo.advantage.estimator advantage_estimator", "learn.algorithm"),
    together("actor.policy_loss_type policy_loss_type", "learn.loss"),
    together("algo.advantage.no_std_norm no_advantage_std_norm", "learn.advantage"),
    together("rollout.batch_size rollout_batch_size", "learn.prompts_per_step", "counted in prompts, as in Trimtab"),
    together("rollout.n_samples_per_prompt n_samples_per_prompt", "learn.samples_per_prompt"),
    together(
        "train.batch_size train_batch_size",
        "learn.updates_per_step",
        "counted in samples, not in prompts",
    ),
    mapped("train.max_epochs max_epochs", "learn.epochs_per_step", whole, "passes over one batch of samples"),
    together(
        "train.num_episodes num_episodes",
        "learn.steps",
        "counts passes over the data, and convert does not know the number of rows",
    ),
    together("rollout.max_new_tokens max_new_tokens generate_max_len", "learn.max_new_tokens"),
    together("data.max_len max_len", "learn.max_new_tokens", "limits prompt and completion together"),
    together("prompt_max_len", "data.max_prompt_tokens", "OpenRLHF removed this flag"),
    mapped("rollout.temperature temperature", "learn.sampling.temperature", number),
    mapped("rollout.top_p top_p", "learn.sampling.top_p", real),
    mapped("actor.adam.lr actor_learning_rate", "learn.lr", real),
    together("actor.adam.betas adam_betas", "learn.optimizer.beta1"),
    mapped("actor.adam.eps", "learn.optimizer.eps", real),
    mapped("actor.adam.weight_decay l2", "learn.optimizer.weight_decay", real),
    mapped("actor.max_norm max_norm", "learn.max_grad_norm", norm),
    together("actor.optim", "learn.optimizer.states"),
    together("actor.lr_scheduler lr_scheduler", "learn.schedule.kind"),
    together("actor.lr_warmup_ratio lr_warmup_ratio", "learn.schedule.warmup_steps"),
    together("actor.min_lr_ratio", "learn.schedule.final"),
    together("actor.eps_clip eps_clip", "learn.clip.low"),
    together("actor.eps_clip_low_high eps_clip_low_high", "learn.clip.high"),
    mapped("actor.dual_clip dual_clip", "learn.clip.dual", some(real), "limits the loss for negative advantages only"),
    mapped("actor.entropy_coef entropy_loss_coef", "learn.entropy_coef", some(real)),
    together("algo.kl.init_coef init_kl_coef", "learn.kl.coef", "the coefficient is per nat and token, as in Trimtab"),
    together(
        "algo.kl.target kl_target",
        "learn.kl.target",
        "OpenRLHF's own code says that its adaptive controller does not fit its trainer; Trimtab's is Ziegler's, in nats a token",
    ),
    together("algo.kl.horizon kl_horizon", "learn.kl.horizon", "counted in samples, as in Trimtab"),
    together("algo.kl.estimator kl_estimator", "learn.kl.estimator"),
    together("algo.kl.use_loss use_kl_loss", "learn.kl.where"),
    mapped(
        "reward.clip_range reward_clip_range",
        "learn.reward_clip",
        pair,
    ),
    together("reward.overlong_buffer_len overlong_buffer_len", "learn.overlong.buffer"),
    together("reward.overlong_penalty_factor overlong_penalty_factor", "learn.overlong.penalty"),
    mapped("algo.dynamic_filtering_enable dynamic_filtering", "learn.dynamic_sampling.enabled", yes),
    together("algo.dynamic_filtering_range dynamic_filtering_reward_range", "learn.dynamic_sampling.enabled"),
    together("algo.advantage.is_correction_enable enable_vllm_is_correction", "learn.importance.level"),
    together("algo.advantage.is_correction_type vllm_is_correction_type", "learn.importance.mode"),
    together("algo.advantage.is_correction_threshold vllm_is_truncated_threshold", "learn.importance.cap"),
    mapped(
        "train.seed seed", "learn.seed", whole, "the samples still differ: each framework has its own random numbers"
    ),
    together("ds.lora.rank lora_rank", "model.lora.r"),
    together("ds.lora.alpha lora_alpha", "model.lora.alpha"),
    together("ds.lora.target_modules target_modules", "model.lora.targets"),
    together("ds.lora.dropout lora_dropout", "model.lora"),
    # data, reward, evaluation
    together("data.prompt_dataset prompt_data", "data.train"),
    mapped("data.prompt_split prompt_split", "data.train_split", text),
    together("data.input_key input_key", "data.prompt"),
    automatic("data.label_key label_key", "every column of the data reaches the rewards by its name"),
    together("data.apply_chat_template apply_chat_template", "data.chat_template"),
    mapped("data.max_samples max_samples", "data.limit", positive),
    unsupported(
        "data.input_template input_template", "write what goes before and after a prompt as data.system and data.suffix"
    ),
    unsupported("data.prompt_probs prompt_data_probs", "join the data sets into one file, in the shares you want"),
    unsupported("data.image_key image_key", "text models only"),
    unsupported("data.max_images_per_prompt max_images_per_prompt", "text models only"),
    unsupported("actor.freeze_visual_encoder freeze_visual_encoder", "text models only"),
    together("reward.remote_url remote_rm_url", "reward.0.fn"),
    unsupported(
        "train.agent_func_path agent_func_path",
        "not converted: write the agent as a class and name it in environment.fn",
    ),
    unsupported(
        "reward.stop_properly_penalty_coef stop_properly_penalty_coef",
        "learn.mask_truncated and learn.overlong are similar",
    ),
    mapped("eval.dataset eval_dataset", "data.eval", text),
    mapped("eval.split eval_split", "data.eval_split", text),
    mapped("eval.temperature eval_temperature", "eval.sampling.temperature", number),
    mapped("eval.n_samples_per_prompt eval_n_samples_per_prompt", "eval.samples_per_prompt", whole),
    mapped("eval.steps eval_steps", "observe.eval_every", every),
    # logs and checkpoints
    mapped("ckpt.save_steps save_steps", "observe.checkpoint_every", every),
    mapped("ckpt.max_num max_ckpt_num", "observe.keep_checkpoints", positive),
    mapped(
        "ckpt.output_dir save_path",
        "observe.dir",
        text,
        "this is the run folder; the trained model is in its final/ folder",
    ),
    automatic("ckpt.path ckpt_path", "checkpoints are in the run's folder", "observe.dir"),
    automatic("ckpt.save_hf save_hf_ckpt", "every checkpoint is a Hugging Face folder"),
    automatic("ckpt.disable_ds disable_ds_ckpt", "checkpoints are safetensors and JSON"),
    automatic(
        "ckpt.max_mem max_ckpt_mem",
        "Trimtab limits the number of checkpoints, not their size",
        "observe.keep_checkpoints",
    ),
    automatic("ckpt.load_enable load_checkpoint", "trimtab train --resume continues from the newest checkpoint"),
    automatic("ckpt.best_metric_key best_metric_key", "Trimtab keeps the best checkpoint by evaluation", "eval.part"),
    automatic(
        "ds.use_universal_ckpt use_ds_universal_ckpt", "checkpoints do not depend on how many devices wrote them"
    ),
    automatic("logger.logging_steps logging_steps", "every step is logged"),
    together("logger.wandb.key use_wandb", "observe.wandb", secret=True),
    together("logger.wandb.project wandb_project", "observe.wandb"),
    unsupported("logger.wandb.org wandb_org", "set WANDB_ENTITY"),
    unsupported("logger.wandb.group wandb_group", "set WANDB_RUN_GROUP"),
    automatic("logger.wandb.run_name wandb_run_name", "the run has the name of its folder", "observe.dir"),
    mapped(
        "logger.tensorboard_dir use_tensorboard",
        "observe.tensorboard",
        lambda value: bool(value),
        "events are in the run's folder: tensorboard --logdir RUN",
    ),
    # placement
    automatic("actor.num_nodes actor_num_nodes", NODES, "run.devices"),
    automatic("actor.num_gpus_per_node actor_num_gpus_per_node", DEVICES, "run.devices"),
    automatic("ref.num_nodes ref_num_nodes", TOGETHER),
    automatic("ref.num_gpus_per_node ref_num_gpus_per_node", TOGETHER),
    automatic(
        "train.colocate_all colocate_all_models",
        "always on: the engine generates with the trainer's own weights, on the same device",
    ),
    automatic(
        "train.colocate_actor_ref colocate_actor_ref",
        "the reference model shares the devices; with LoRA it is the base model itself",
        "run.offload.reference",
    ),
    automatic("vllm.num_engines vllm_num_engines", ENGINES, "run.engine"),
    automatic(
        "vllm.tensor_parallel_size vllm_tensor_parallel_size",
        ENGINE_CUT,
        "run.rollout.tensor_parallel",
    ),
    automatic(
        "vllm.gpu_memory_utilization vllm_gpu_memory_utilization",
        "Trimtab gives the KV cache the memory that the plan leaves over",
        "run.rollout.kv_memory",
    ),
    automatic(
        "vllm.enable_sleep vllm_enable_sleep",
        "always on: the engine lends the KV cache's memory to the update; no weights are moved",
        "run.rollout.lend_memory",
    ),
    automatic(
        "ds.enable_sleep deepspeed_enable_sleep",
        "Trimtab moves the optimizer state to host memory where device memory is short",
        "run.offload.optimizer",
    ),
    automatic(
        "vllm.enable_prefix_caching enable_prefix_caching",
        "always on: the samples of a prompt share its KV cache",
        "run.rollout.prefix_cache",
    ),
    automatic("vllm.enforce_eager enforce_eager", "the native engine decides what to run as CUDA graphs"),
    dead(
        "vllm.sync_backend vllm_sync_backend",
        "OpenRLHF uses it only with sync_with_ray, so it need not be nccl. Engines on the trainer's devices read its own weights",
    ),
    automatic("vllm.sync_with_ray vllm_sync_with_ray", "engines read the trainer's own weights"),
    # memory and speed
    automatic("ds.zero_stage zero_stage", SHARD, "run.shard"),
    automatic("ds.zpg zpg", SHARD_GROUP, "run.shard_devices"),
    automatic("ds.packing_samples packing_samples", "always: nothing is padded anywhere"),
    automatic(
        "train.dynamic_batch_enable use_dynamic_batch",
        "always on: Trimtab fills micro-batches up to a token budget",
        "run.token_budget",
    ),
    automatic(
        "train.max_tokens_per_gpu train_max_tokens_per_gpu",
        "Trimtab takes a hard limit from the memory plan; OpenRLHF may exceed its own",
        "run.token_budget",
    ),
    automatic(
        "rollout.max_tokens_per_gpu rollout_max_tokens_per_gpu",
        "passes without gradients have their own token budget",
        "run.score_token_budget",
    ),
    automatic(
        "train.micro_batch_size micro_train_batch_size",
        "follows from the token budget; the gradient is the same",
        "run.token_budget",
    ),
    automatic(
        "rollout.micro_batch_size micro_rollout_batch_size",
        "in OpenRLHF it splits scoring, not generation: a larger value does not generate faster. Trimtab uses a token budget",
        "run.score_token_budget",
    ),
    automatic(
        "actor.gradient_checkpointing_enable gradient_checkpointing",
        "Trimtab recomputes activations where memory is short, the cheapest for their size first",
        "run.checkpoint_activations",
    ),
    automatic(
        "actor.gradient_checkpointing_reentrant gradient_checkpointing_use_reentrant",
        "Trimtab's own recomputation",
        "run.checkpoint_activations",
    ),
    automatic(
        "ds.adam_offload adam_offload",
        "Trimtab streams it from host memory where device memory is short",
        "run.offload.optimizer",
    ),
    automatic(
        "ref.offload ref_reward_offload",
        "if memory is short, the reference is on the device only while it scores. In OpenRLHF the flag has no effect "
        "below ZeRO-3",
        "run.offload.reference",
    ),
    automatic("ds.overlap_comm overlap_comm", OVERLAP, "run.overlap"),
    automatic("ds.deepcompile deepcompile", "known layers are fused in own kernels"),
    automatic("ds.use_liger_kernel use_liger_kernel", LIGER, "run.kernels"),
    automatic("ds.param_dtype param_dtype bf16", "bfloat16 with float32 masters on a GPU", "model.dtype"),
    automatic("ds.grad_accum_dtype grad_accum_dtype", "Trimtab always adds gradients in float32"),
    automatic("ds.attn_implementation attn_implementation flash_attn", "one attention for training and generation"),
    automatic("ds.experts_implementation", "the model defines it"),
    automatic("data.dataloader_num_workers dataloader_num_workers", "Trimtab tokenises prompts ahead, in a thread"),
    automatic("data.disable_fast_tokenizer disable_fast_tokenizer", "Trimtab uses the tokenizer's own default"),
    automatic(
        "train.full_determinism_enable full_determinism", "sampling depends only on seed, step, prompt and position"
    ),
    automatic("local_rank", "launchers set it"),
    dead("perf", "OpenRLHF removed this flag; Trimtab shows time and memory for every step"),
    dead("actor_init_on_gpu", "OpenRLHF removed this flag; Trimtab loads weights straight to the device"),
    # not here
    automatic("ds.ring_attn_size ring_attn_size", ROWS, "run.sequence_parallel"),
    automatic("ds.ring_attn_head_stride ring_head_stride", ROWS_PLAN),
    unsupported("ds.tensor_parallel_size ds_tensor_parallel_size", LAYERS),
    together("train.async_enable async_train", "learn.staleness"),
    together("train.async_queue_size async_queue_size", "learn.staleness"),
    unsupported("train.partial_rollout_enable partial_rollout", "weights do not change within a completion"),
    unsupported(
        "rollout.vllm_generate_batch_size vllm_generate_batch_size",
        "Trimtab samples only what it trains on; see learn.dynamic_sampling",
    ),
    unsupported(
        "ds.load_in_4bit load_in_4bit", "write model.base: 4bit or fp8 with model.lora: it stores the frozen weights so"
    ),
    unsupported("train.enable_ema enable_ema", "Trimtab keeps no moving average of the weights"),
    unsupported("train.ema_beta ema_beta", "Trimtab keeps no moving average of the weights"),
    unsupported(
        "actor.aux_loss_coef aux_loss_coef", "micro-batches are balanced there, here whole steps: learn.router_aux_coef"
    ),
    unsupported("ptx_coef", "OpenRLHF removed this flag; Trimtab mixes in no pretraining loss"),
    unsupported("use_ms", "put the model and the data into folders, and write their paths"),
)
