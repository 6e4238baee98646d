"""What a config says of sequences and of layers, where there is more than one place to look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SERVED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that any architecture may have."""
HYBRIDS = {
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe", "nemotron_h", "granitemoehybrid",
    "falcon_h1", "bamba",
}  # fmt: skip
"""Families whose other layers carry a state from token to token (recurrent.py), by the names of their text models; tests compare
each with transformers' own forward and `generate`."""
HYBRID_LAYERS = SERVED_LAYERS | {"linear_attention", "conv", "hybrid", "mlp", "moe"}
"""Kinds of layers in these, by transformers' names: those that carry a state, those that do that and attend, and those that
read one token at a time."""
TOKENWISE_LAYERS = {"mlp", "moe"}


def served_layers(model_type: str | None) -> set[str]:
    """The kinds of layers that a family may have."""
    return HYBRID_LAYERS if model_type in HYBRIDS else SERVED_LAYERS


LONGROPE = ("longrope", "su")


NEAREST = {
    "axk2": "axk1", "bailing_hybrid": "qwen3_next", "deepseek_v32": "deepseek_v3", "deepseek_v4": "deepseek_v3",
    "falcon_mamba": "falcon_h1", "gemma3n": "gemma3", "gemma3n_text": "gemma3_text", "glm5_next": "glm4_moe",
    "glm_moe_dsa": "glm4_moe", "gpt_neox_japanese": "gpt_neox", "hy_v4": "hy_v3", "jamba": "granitemoehybrid",
    "kimi_linear": "qwen3_next", "llama4": "llama", "llama4_text": "llama", "mamba": "falcon_h1", "mamba2": "falcon_h1",
    "minimax": "minimax_m2", "modernbert-decoder": "gemma3_text", "nemotron": "llama", "phimoe": "mixtral",
    "qwen4_exp": "qwen3_next", "qwen4_exp_text": "qwen3_next", "recurrent_gemma": "gemma2", "zamba": "granitemoehybrid",
    "zamba2": "granitemoehybrid", "zaya": "qwen3_moe",
}  # fmt: skip
"""Of families (`model_type`) that are refused, the served one that is most like it."""
NOISY = {"phimoe"}
"""Families whose router is another function in training than without."""
USUAL = "qwen3, llama or gemma3_text"


def nearest_served(model_type: str | None) -> str:
    """What to say of a family that is refused: which served one is nearest."""
    return f"The nearest family that is served: {NEAREST.get(model_type or '', USUAL)} (docs/models.md has all)."


def context_of(config: Any) -> int:
    """Tokens of the longest sequence that a text model is used for, by its config or by the dict of its config.json.

    With longrope that is the length before the rotation is stretched. From the first sequence beyond it on, transformers turns
    the tokens of all sequences of a pass otherwise: what a sequence gives would depend on what else is in flight. With YaRN it is
    the length that the rotation is stretched to, which many configs do not write into `max_position_embeddings`.
    """
    read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    context = int(read("max_position_embeddings") or 2**31)
    rotation = read("rope_parameters") or read("rope_scaling") or {}
    # One rotation, or one for each kind of layer.
    kinds = [part for part in (rotation, *rotation.values()) if isinstance(part, Mapping)]
    for part in kinds:
        if part.get("rope_type", part.get("type")) in LONGROPE:
            before = part.get("original_max_position_embeddings") or read("original_max_position_embeddings")
            context = min(context, int(before or context))
        elif part.get("rope_type", part.get("type")) == "yarn":  # turns every token alike, however long a sequence is
            before, factor = part.get("original_max_position_embeddings"), part.get("factor")
            context = max(context, int(before * factor)) if before and factor else context
    return context


def config_of_layer(config: Any, index: int) -> Any:
    """The config as a layer sees it: sizes may differ from layer to layer, and the whole config does not tell them then."""
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config
