"""The text part of a model that also sees: its config as a language model of its own, and which stored weights are its.

A vision-language checkpoint holds a decoder of text, whose weights have a prefix, and a part that turns images into embeddings.
On text alone the decoder is a known language model. It is loaded, trained and saved as that; the rest is never read, until the
trained weights are put back in their places (with_vision.py).

Guarantee: `WRAPPERS` lists what tests compare with the whole model, text alone, in float64; another is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from trimtab.base.errors import ModelError

WRAPPERS = {
    "gemma3", "gemma4", "gemma4_unified", "idefics3", "internvl", "llava", "llava_next",
    "llava_onevision", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
}  # fmt: skip
"""Families (`model_type`) whose text part is served, if its layers are."""
SAME_AS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text parts that have no class of their own as a language model, and what they are: their rotation in three dimensions is the
plain one where all three positions are the same, as they are in text."""
WHERE = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
HEAD = re.compile(r"^(?:model\.)?(?:language_model\.)?lm_head\.")
OTHER = re.compile(
    r"(^|\.)(visual|vision\w*|multi_modal\w*|mm_projector|connector|image_newline|audio\w*|embed_vision|embed_audio|mtp)\."
)


def sees(config: Any) -> bool:
    """The config is that of a model with more than a text part."""
    parts = getattr(config, "sub_configs", None) or {}
    return "text_config" in parts and isinstance(getattr(config, "text_config", None), PreTrainedConfig)


def text_config(path: str, config: Any) -> Any:
    """The config of the text part, as a language model's. Refuses a model whose text part is not known to be one."""
    kind = config.model_type
    text = config.text_config
    if kind not in WRAPPERS:
        raise ModelError(
            f"model.path: {path!r} is a {kind} model, which is more than a language model, and its text part "
            f"({text.model_type}) was not compared with it. Trimtab trains the text part of: {', '.join(sorted(WRAPPERS))}."
        )
    found = _plain(text) if text.model_type in SAME_AS else deepcopy(text)
    if type(found) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"model.path: the text part of {path!r}, {text.model_type}, is not a causal language model.")
    made = AutoModelForCausalLM._model_mapping[type(found)]
    found.architectures = [made.__name__]
    found.tie_word_embeddings = bool(config.tie_word_embeddings)
    found.dtype = config.dtype or found.dtype
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if getattr(found, name, None) is None:
            setattr(found, name, getattr(config, name, None))
    return found


def _plain(text: Any) -> Any:
    """The same sizes under the name of the family that the text part is."""
    held = text.to_dict()
    rotation = {
        k: v for k, v in (held.get("rope_parameters") or {}).items() if not k.startswith("mrope") and k != "type"
    }
    if rotation.get("rope_type") == "mrope":
        rotation["rope_type"] = "default"
    held |= {"rope_parameters": rotation}
    kind = SAME_AS[held.pop("model_type")]
    if kind == "qwen3_moe":
        held["norm_topk_prob"] = True  # always so there
    known = CONFIG_MAPPING[kind]
    return known(
        **{name: value for name, value in held.items() if name not in ("architectures", "transformers_version")}
    )


@dataclass(frozen=True)
class Turned:
    """A tensor in a file, the other way round where it is not of the model's shape: Qwen3-VL's experts are published by inputs
    and saved by transformers by outputs, which tells them apart as is done here."""

    waiting: Any
    shape: tuple[int, int]

    def __getitem__(self, at: Any) -> torch.Tensor:
        found: torch.Tensor = self.waiting[at]
        return found if found.shape[-2:] == self.shape else found.transpose(-2, -1).contiguous()


def experts_turned(state: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """The tensors of a text part, with stacked experts as a language model has them."""
    if config.model_type != SAME_AS["qwen3_vl_moe_text"]:
        return dict(state)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    shapes = {"mlp.experts.gate_up_proj": (2 * width, hidden), "mlp.experts.down_proj": (hidden, width)}
    found = {}
    for name, waiting in state.items():
        shape = next((shape for end, shape in shapes.items() if name.endswith(end)), None)
        found[name] = waiting if shape is None else Turned(waiting, shape)
    return found


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Stored names of the text part's weights, and what they are called in a language model."""
    there = list(names)
    apart = any(WHERE.match(name) for name in there)
    found = {}
    for name in there:
        if HEAD.match(name):
            found[name] = HEAD.sub("lm_head.", name)
        elif WHERE.match(name):
            found[name] = WHERE.sub("model.", name)
        elif not apart and name.startswith("model.") and not OTHER.search(name):
            found[name] = name  # Qwen2-VL's and Qwen2.5-VL's published files
    return found
