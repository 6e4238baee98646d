"""Low-rank adapters (PEFT's LoRA): put on, read back, merged into a copy.

Adapters of a half-precision model are float32, so the optimizer needs no masters for them. There is no dropout: what is sampled
and what is trained are the same function. With adapters the reference policy is the model without them, and costs no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from trimtab.base.errors import ADAPTERS_ON_EXPERTS, ConfigError, Problem
from trimtab.config.schema import Lora
from trimtab.model.quantised import QuantisedLinear, whole_weight
from trimtab.model.transfer import apart


def has_adapters(model: Any) -> bool:
    return isinstance(model, PeftModel)


def refuse_unknown_targets(lora: Lora, config: Any, trust_remote_code: bool) -> None:
    """Refuse a wrong name in `targets` by the architecture alone, before any weight is read."""
    if lora.targets == "all-linear":
        text = config.get_text_config()
        if any(getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
            raise ConfigError([ADAPTERS_ON_EXPERTS])
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)]
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
    )  # fmt: skip
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        return _as_beside_plain_weights(get_peft_model(model, settings))


def save_adapters(model: PeftModel, folder: Path) -> None:
    """Save the adapters alone, as PEFT reads them."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a card that names this machine's folders


def load_adapters(model: Any, folder: Path) -> PeftModel:
    """The model with the adapters of a checkpoint, which can be trained further."""
    return _as_beside_plain_weights(PeftModel.from_pretrained(model, str(folder), is_trainable=True))


def _as_beside_plain_weights(model: PeftModel) -> PeftModel:
    """PEFT makes adapters in the type of the weights beside them, and half precision into float32; codes have no such type."""
    for layer in model.modules():
        base = getattr(layer, "base_layer", None)
        if isinstance(base, QuantisedLinear) and isinstance(layer, LoraLayer):
            for adapter in (layer.lora_A, layer.lora_B):
                adapter.to(torch.promote_types(base.computes_in, torch.float32))
    return model


@torch.no_grad()
def merged_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """The base model's weights under its own names, in the host's memory, with what the adapters add rounded in once. Weights
    that are stored in codes are what the codes stand for, in the model's type."""
    base = model.get_base_model()
    state = {name: value for name, value in base.state_dict().items() if ".lora_" not in name}
    for name, layer in base.named_modules():
        if isinstance(layer, QuantisedLinear):
            for part in layer.stored:
                del state[f"{name}.{part}"]
            state[f"{name}.weight"] = layer.dequantised().cpu()
    for name, layer in base.named_modules():
        if hasattr(layer, "lora_A"):
            weight = whole_weight(layer.base_layer)
            whole = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for adapter in layer.active_adapters:
                whole += layer.get_delta_weight(adapter)
            state[f"{name}.base_layer.weight"] = whole.to(
                weight.dtype
            ).cpu()  # at once: the device may have no room for all
    return {name.replace(".base_layer.", "."): apart(value.cpu()) for name, value in state.items()}
