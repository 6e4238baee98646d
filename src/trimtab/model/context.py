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
