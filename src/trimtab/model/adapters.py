"""Low-rank adapters (PEFT's LoRA): put on, read back, merged into a copy.

Adapters of a half-precision model are float32, so the optimizer needs no masters for them. There is no dropout: what is sampled
and what is trained are the same function. With adapters the reference policy is the model without them, and costs no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from trimtab.base.errors import ADAPTERS_ON_EXPERTS, ConfigError, Problem
from trimtab.config.schema import Lora
from trimtab.model.context import TOKENWISE_LAYERS
from trimtab.model.transfer import apart

NO_ADAPTERS_ON_OUT_PROJ = {"falcon_h1", "nemotron_h"}
"""Families that PEFT refuses them for: a kernel of theirs reads that weight alone."""


def has_adapters(model: Any) -> bool:
    return isinstance(model, PeftModel)


def refuse_unknown_targets(lora: Lora, config: Any, trust_remote_code: bool) -> None:
    """Refuse a wrong name in `targets` by the architecture alone, before any weight is read."""
    if lora.targets == "all-linear":
        text = config.get_text_config()
        named = TOKENWISE_LAYERS.intersection(getattr(text, "layer_types", None) or [])
        experts = any(getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
        if experts and named != {"mlp"}:  # a config may state experts that none of its layers has
            raise ConfigError([ADAPTERS_ON_EXPERTS])
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    if config.get_text_config().model_type in NO_ADAPTERS_ON_OUT_PROJ and "out_proj" in lora.targets:
        what = f"PEFT puts no adapters on out_proj of a {config.get_text_config().model_type} model"
        raise ConfigError([Problem("model.lora.targets", what, "Leave it out, or write all-linear, which does.")])
    unknown = [target for target in lora.targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if unknown or not lora.targets:
        what = f"{type(model).__name__} has no linear layer {', '.join(unknown)}" if unknown else "the list is empty"
        there = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names} - {"lm_head"}))
        raise ConfigError([Problem("model.lora.targets", what, f"Choose from: {there}. Or write all-linear.")])


def add_adapters(model: Any, lora: Lora, seed: int) -> PeftModel:
    """The model with new adapters, which add nothing yet; every other weight is frozen."""
    settings = LoraConfig(
        r=lora.r, lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha, target_modules=lora.targets, lora_dropout=0.0,
        bias="none", task_type="CAUSAL_LM",
        exclude_modules=["out_proj"] if model.config.model_type in NO_ADAPTERS_ON_OUT_PROJ else None,
    )  # fmt: skip
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return get_peft_model(model, settings)


def save_adapters(model: PeftModel, folder: Path) -> None:
    """Save the adapters alone, as PEFT reads them."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a card that names this machine's folders


def load_adapters(model: Any, folder: Path) -> PeftModel:
    """The model with the adapters of a checkpoint, which can be trained further."""
    return PeftModel.from_pretrained(model, str(folder), is_trainable=True)


@torch.no_grad()
def merged_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The base model's weights under its own names, in the host's memory, with what the adapters add rounded in once."""
    base = model.get_base_model()
    state = {name: value for name, value in base.state_dict().items() if ".lora_" not in name}
    for name, layer in base.named_modules():
        if hasattr(layer, "lora_A"):
            weight = layer.base_layer.weight
            whole = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for adapter in layer.active_adapters:
                whole += layer.get_delta_weight(adapter)
            state[f"{name}.base_layer.weight"] = whole.to(
                weight.dtype
            ).cpu()  # at once: the device may have no room for all
    return {name.replace(".base_layer.", "."): apart(value.cpu()) for name, value in state.items()}
