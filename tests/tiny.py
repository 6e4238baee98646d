"""Tiny random models and a character tokenizer, the raw material of most tests."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*=<># abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;!?'\"()\n"
SPECIAL = ["<pad>", "<bos>", "<eos>"]
VOCABULARY = len(CHARACTERS) + len(SPECIAL)

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "head_dim": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 5},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": 6},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, **MOE},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "decoder_sparse_step": 1, **MOE},
    "olmoe": {"num_experts": 4, **MOE},
    "qwen2_moe": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        **MOE,
    },
    "deepseek_v2": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "num_key_value_heads": 4,
        "routed_scaling_factor": 1.5,
        "topk_method": "greedy",
        **LATENT,
        **MOE,
    },
    "deepseek_v3": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 12,
        "num_key_value_heads": 4,
        "n_group": 2,
        "topk_group": 1,
        **LATENT,
        **MOE,
    },
    "glm4_moe": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        **MOE,
    },
    "granite": {"logits_scaling": 2.0},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "sliding_window": 5, "rope_scaling": None, **MOE},
}

RELATIVES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2},
    "exaone4": {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2},
    "gemma": {"head_dim": 8},
    "glm": {"head_dim": 8, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5, "attention_bias": True},
    "ministral": {"head_dim": 8, "sliding_window": 5},
    "olmo3": {"sliding_window": 5},
    "seed_oss": {"head_dim": 8, "attention_bias": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "vaultgemma": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
}
"""Families whose layers are put together from the same parts."""


def tiny_model(architecture: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random model of a few thousand parameters, with weights large enough that mistakes show."""
    settings = {**BASE, **ARCHITECTURES.get(architecture, RELATIVES.get(architecture, {})), **changes}
    config = AutoConfig.for_model(architecture, **settings)
    torch.manual_seed(seed)
    # Grouped matrix products have no float64 kernel; plain loops over experts do the same sum.
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=numbers))  # the same in every type
    return model.eval()


def tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = chat_template
    return tokenizer


_DELTA: dict[str, Any] = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, "num_experts": 0},
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": {name: value for name, value in _DELTA.items() if name != "head_dim"} | {"linear_num_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"], "head_dim": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    },
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 0,
        "shared_intermediate_size": 48, "logits_scaling": 2.0,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 1.5, "head_dim": 8, "mamba_chunk_size": 8},
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 8},
}  # fmt: skip
"""Families with layers that carry a state."""
MIXTURE_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_DELTA, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
        "num_experts_per_tok": 2,
    },
    "qwen3_5_moe_text": {
        **_DELTA, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "num_experts": 4, "moe_intermediate_size": 16,
        "num_experts_per_tok": 2, "num_dense_layers": 1,
    },
}  # fmt: skip


def tiny_hybrid(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    return tiny_model(architecture, dtype, seed, **{**HYBRIDS[architecture], **changes})
