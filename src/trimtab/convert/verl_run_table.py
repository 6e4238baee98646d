"""verl's keys of rollout, memory, placement and profiling, one rule each: what Trimtab decides now, and what it has not.

`A.` stands for `actor_rollout_ref.`.
"""

from __future__ import annotations

from trimtab.convert.devices import ENGINE_CUT, ENGINES, LAYERS, OWN_RANKS, PREFETCH, ROWS, SHARD, SHARD_GROUP
from trimtab.convert.rules import LIGER, SFT, ConvertRule, automatic, dead, each, unsupported

MICRO = (
    "follows from the token budget. In verl it changes the loss, because verl averages tokens within each micro-batch"
)
SCORE = "passes without gradients have their own token budget. In verl, sizes that differ from the update's move the ratio off 1"
TRACE = "every phase of every step is in RUN/trace.json"
ENGINE = "the native engine generates with the trainer's own weights"
CHUNKED = "always on: Trimtab computes log-probs and entropy in chunks, and again in the backward pass"

RUN_RULES: tuple[ConvertRule, ...] = (
    # rollout
    automatic("A.rollout.name | rollout.engine", "the native engine", "run.engine"),
    automatic("A.rollout.mode", "one native engine on each device, in the trainer's process", "run.engine"),
    automatic(
        "A.rollout.gpu_memory_utilization | rollout.gpu_memory_utilization",
        "Trimtab gives the KV cache the memory that the plan leaves over. In verl the meaning depends on the engine",
        "run.rollout.kv_memory",
    ),
    automatic(
        "A.rollout.max_num_seqs | rollout.max_num_seqs max_num_seqs",
        "Trimtab runs as many as the KV cache holds",
        "run.rollout.max_sequences",
    ),
    automatic(
        "A.rollout.max_num_batched_tokens | max_num_batched_tokens",
        "the most prompt tokens in one prefill pass",
        "run.rollout.prefill_tokens",
    ),
    automatic(
        "A.rollout.max_model_len | rollout.max_model_len",
        "Trimtab takes the longest prompt plus the longest completion",
        "data.max_prompt_tokens",
    ),
    automatic(
        "A.rollout.tensor_model_parallel_size | A.rollout.tensor_parallel_size rollout.tensor_parallel_size tensor_parallel_size",
        ENGINE_CUT,
        "run.rollout.tensor_parallel",
    ),
    automatic("A.rollout.data_parallel_size", ENGINES, "run.devices"),
    automatic("A.rollout.disable_log_stats", "Trimtab shows tokens per second, batch size and KV use for every step"),
    automatic("A.rollout.enforce_eager", "the native engine decides what to run as CUDA graphs"),
    automatic("A.rollout.free_cache_engine", "the KV cache's memory is lent to the update", "run.rollout.lend_memory"),
    automatic("A.rollout.enable_chunked_prefill", "long prompts are prefilled in chunks", "run.rollout.prefill_tokens"),
    automatic("A.rollout.enable_prefix_caching", "on", "run.rollout.prefix_cache"),
    automatic("A.rollout.load_format", "the engine generates with the trainer's own weights"),
    automatic("A.rollout.layered_summon", "no weights are sent"),
    automatic("A.rollout.dtype", "the trainer's", "model.dtype"),
    automatic(
        "A.rollout.checkpoint_engine.update_weights_bucket_megabytes A.rollout.update_weights_bucket_megabytes",
        "no weights are sent",
    ),
    automatic("A.rollout.checkpoint_engine.backend", "no weights are sent"),
    automatic("A.rollout.calculate_log_probs", "always on: the engine returns log-probs with the tokens"),
    automatic("A.rollout.agent.num_workers", ENGINES),
    automatic("A.rollout.seed", "sampling depends on learn.seed, step, prompt and position", "learn.seed"),
    dead("A.rollout.do_sample", "training always samples; Trimtab rejects a temperature of 0"),
    dead("A.rollout.ignore_eos", "for benchmarks only; a completion ends at its end-of-sequence token"),
    unsupported(
        "A.rollout.multi_turn.enable",
        "tools are not converted: write Python functions and name them in environment.tools",
    ),
    unsupported("A.rollout.quantization", "the engine generates with the trainer's own weights"),
    # batches and memory
    automatic(
        "A.actor.ppo_micro_batch_size_per_gpu A.actor.ppo_micro_batch_size "
        "| training.micro_batch_size ppo_micro_batch_size_per_gpu",
        MICRO,
        "run.token_budget",
    ),
    automatic(
        "A.actor.use_dynamic_bsz | use_dynamic_bsz",
        "always on: Trimtab fills micro-batches up to a token budget",
        "run.token_budget",
    ),
    automatic(
        "A.actor.ppo_max_token_len_per_gpu",
        "Trimtab takes a hard limit from the memory plan. Before August 2026, micro-batches of verl could exceed this one",
        "run.token_budget",
    ),
    automatic(
        "A.rollout.log_prob_micro_batch_size_per_gpu A.rollout.log_prob_micro_batch_size",
        SCORE,
        "run.score_token_budget",
    ),
    automatic(
        "A.ref.log_prob_micro_batch_size_per_gpu A.ref.log_prob_micro_batch_size", SCORE, "run.score_token_budget"
    ),
    automatic("A.rollout.log_prob_max_token_len_per_gpu", SCORE, "run.score_token_budget"),
    automatic("A.ref.log_prob_max_token_len_per_gpu", SCORE, "run.score_token_budget"),
    automatic("A.rollout.log_prob_use_dynamic_bsz", SCORE, "run.score_token_budget"),
    automatic("A.ref.log_prob_use_dynamic_bsz", SCORE, "run.score_token_budget"),
    automatic("A.model.use_remove_padding | use_remove_padding", "always on: Trimtab pads nothing"),
    automatic(
        "A.model.enable_gradient_checkpointing | actor.gradient_checkpointing",
        "Trimtab recomputes activations where memory is short, the cheapest for their size first",
        "run.checkpoint_activations",
    ),
    automatic(
        "A.model.enable_activation_offload",
        "Trimtab offloads activations if the longest sequence does not fit otherwise",
        "run.offload.activations",
    ),
    automatic(
        "A.actor.fsdp_config.optimizer_offload | actor.offload_optimizer_states",
        "Trimtab streams it from host memory where device memory is short",
        "run.offload.optimizer",
    ),
    automatic(
        "A.actor.fsdp_config.param_offload | actor.offload_param",
        "the weights stay on the device: the engine generates with them",
    ),
    automatic(
        "A.ref.fsdp_config.param_offload",
        "if memory is short, the reference is on the device only while it scores",
        "run.offload.reference",
    ),
    automatic(
        "A.actor.fsdp_config.model_dtype A.actor.fsdp_config.dtype | training.bf16",
        "bfloat16 with float32 masters on a GPU",
        "model.dtype",
    ),
    automatic("A.actor.fsdp_config.fsdp_size", SHARD_GROUP, "run.shard_devices"),
    automatic("A.actor.fsdp_config.reshard_after_forward", SHARD, "run.shard"),
    automatic(
        "A.actor.fsdp_config.forward_prefetch | fsdp_config.forward_prefetch",
        f"{PREFETCH}. verl ignores it on FSDP2",
    ),
    automatic("A.ref.fsdp_config.forward_prefetch", PREFETCH),
    automatic("A.actor.strategy", OWN_RANKS, "run.shard"),
    automatic("A.ref.strategy", OWN_RANKS, "run.shard"),
    automatic("A.hybrid_engine", "always on: the engine generates with the trainer's own weights"),
    automatic("A.model.use_fused_kernels", CHUNKED, "run.logprob_chunk"),
    automatic("A.model.fused_kernel_options.impl_backend", CHUNKED, "run.logprob_chunk"),
    automatic("A.model.use_liger | model.use_liger", LIGER, "run.kernels"),
    automatic("A.model.use_shm", "Trimtab reads the weights once"),
    automatic("A.actor.use_torch_compile", "Trimtab has its own fused kernels for known layers"),
    automatic(
        "A.actor.entropy_from_logits_with_chunking A.actor.fsdp_config.entropy_from_logits_with_chunking",
        CHUNKED,
        "run.logprob_chunk",
    ),
    automatic("A.actor.entropy_checkpointing A.actor.fsdp_config.entropy_checkpointing", CHUNKED, "run.logprob_chunk"),
    dead(
        "A.ref.entropy_from_logits_with_chunking",
        "verl's guide names this key, but its reference computes no entropy; the actor's key does. In Trimtab it is "
        + CHUNKED,
    ),
    dead("A.actor.shuffle", "Trimtab splits the batch by prompt, in the order of sampling"),
    automatic(
        "A.actor.ulysses_sequence_parallel_size A.actor.fsdp_config.ulysses_sequence_parallel_size "
        "| ulysses_sequence_parallel_size",
        ROWS,
        "run.sequence_parallel",
    ),
    automatic("A.ref.ulysses_sequence_parallel_size", ROWS, "run.sequence_parallel"),
    automatic("A.actor.megatron.context_parallel_size", ROWS, "run.sequence_parallel"),
    automatic("A.ref.megatron.context_parallel_size", ROWS, "run.sequence_parallel"),
    automatic("A.actor.megatron.tensor_model_parallel_size A.ref.megatron.tensor_model_parallel_size", LAYERS),
    *each(
        unsupported,
        "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold "
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "Trimtab does not reject samples; learn.importance with mode: mask is similar",
    ),
    unsupported("algorithm.use_pf_ppo", "Trimtab does not reweight samples"),
    *each(unsupported, "config_name config_path config_dir", "names a Hydra config file: give that file with --file"),
    *each(automatic, "global_profiler.tool trainer.profile_steps", "every phase of every step is in RUN/trace.json"),
    # families
    *each(
        automatic,
        "A.actor.megatron.* A.ref.megatron.* A.actor.veomni.* A.ref.veomni.* A.actor.torchtitan.*",
        OWN_RANKS,
        "run.shard",
    ),
    *each(
        automatic,
        "A.actor.fsdp_config.* A.ref.fsdp_config.* A.actor.engine.* A.ref.engine.* model_engine "
        "A.actor.fsdp_config.grad_offload A.ref.fsdp_config.grad_offload",
        OWN_RANKS,
        "run.shard",
    ),
    *each(automatic, "global_profiler.* A.actor.profiler.* A.ref.profiler.* A.rollout.profiler.*", TRACE),
    *each(
        automatic,
        "A.rollout.engine_kwargs.* A.rollout.agent.* A.rollout.checkpoint_engine.* A.rollout.prometheus.*",
        ENGINE,
    ),
    *each(
        automatic,
        "A.rollout.expert_parallel_size A.rollout.multi_stage_wake_up A.rollout.cudagraph_capture_sizes",
        ENGINE,
    ),
    *each(
        automatic,
        "ray_kwargs.* trainer.ray_wait_register_center_timeout A.nccl_timeout transfer_queue.*",
        "one machine needs no Ray",
    ),
    automatic("A.ref.use_torch_compile", "Trimtab has its own fused kernels for known layers"),
    automatic(
        "A.actor.checkpoint.*",
        "a checkpoint always holds model, optimizer and run state",
        "observe.checkpoint_every",
    ),
    automatic("data.filter_overlong_prompts_workers", "Trimtab tokenises prompts ahead, in a thread"),
    automatic("A.actor.calculate_entropy", "always on: entropy is a metric of every step"),
    automatic(
        "reward.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.overlong_buffer_cfg.log "
        "reward_model.overlong_buffer.log",
        "Trimtab logs rewards before and after the penalty",
    ),
    automatic(
        "reward.reward_kwargs.max_resp_len reward_model.reward_kwargs.max_resp_len",
        "the penalty reaches its full size at learn.max_new_tokens",
        "learn.max_new_tokens",
    ),
    unsupported("A.actor.optim.override_optimizer_config.*", "AdamW on float32 masters"),
    *each(
        unsupported,
        "A.actor.optim.init_lr_ratio A.actor.optim.*",
        "see learn.optimizer and learn.schedule for what Trimtab offers",
    ),
    automatic("A.ref.entropy_checkpointing", "the reference computes no entropy"),
    *each(
        unsupported,
        "async_training.* rollout.*",
        "write learn.staleness and run.placement: samples are exactly so many steps old",
    ),
    unsupported("hydra.*", "sets Hydra itself, which Trimtab does not use"),
    unsupported("data.apply_chat_template_kwargs.*", "the tokenizer's template is applied as it is"),
    unsupported(
        "A.rollout.multi_turn.*", "tools are not converted: write Python functions and name them in environment.tools"
    ),
    unsupported("A.model.mtp.*", "Trimtab predicts one token at a time"),
    unsupported("A.model.override_config.*", "Trimtab uses the config of the checkpoint: change that"),
    unsupported("distillation.*", "Trimtab has no teacher: it learns from rewards only"),
    unsupported("algorithm.rollout_correction.*", "see learn.importance for what Trimtab offers"),
    *each(unsupported, "data.image_key data.video_key data.audio_key data.mm_processor_kwargs.*", "text models only"),
    unsupported("data.custom_cls.*", "write the rows to a JSONL or Parquet file"),
    *each(
        unsupported,
        "optim model engine optim.* model.* engine.* data.messages_key data.micro_batch_size_per_gpu data.max_token_len_per_gpu",
        SFT,
    ),
    *each(automatic, "A.rollout.disaggregation.* A.rollout.trace.* A.rollout.val_kwargs.*", ENGINE),
    *each(automatic, "A.model.tiled_mlp.* A.model.fused_kernel_options.*", CHUNKED),
    *each(
        unsupported,
        "A.actor.router_replay.* A.ref.router_replay.*",
        "the engine and the trainer route by the same weights",
    ),
    *each(
        automatic,
        "reward.reward_manager.* reward.custom_reward_function.*",
        "rewards run in worker processes",
        "run.reward_workers",
    ),
    *each(automatic, "trainer.v1.* skip.*", "sampling and training take turns in one loop"),
    automatic("_target_.*", "names a class inside verl"),
    unsupported("A.actor.policy_loss.*", "belongs to a loss that Trimtab does not have"),
    unsupported("A.actor.qat.*", "Trimtab trains no quantised weights"),
    unsupported("A.model.lora.*", "Trimtab trains standard LoRA adapters: see model.lora"),
    unsupported("algorithm.pf_ppo.*", "Trimtab does not reweight samples"),
    *each(
        unsupported,
        "reward.sandbox_fusion.* reward_model.sandbox_fusion.* sandbox_fusion.*",
        "call the sandbox from a reward function",
    ),
)
