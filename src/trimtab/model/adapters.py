"""Low-rank adapters (PEFT's LoRA): put on, read back, merged into a copy.

Adapters of a half-precision model are float32, so the optimizer needs no masters for them. There is no dropout: what is sampled
and what is trained are the same function. With adapters the reference policy is the model without them, and costs no memory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.schema import Lora
from trimtab.model.codes import QuantisedLinear, whole_weight
from trimtab.model.expert_adapters import merged_stack, stacked_weights, stand_beside_products
from trimtab.model.transfer import apart

NO_ADAPTERS_ON_OUT_PROJ = {"falcon_h1", "nemotron_h"}
"""Families that PEFT refuses them for: a kernel of theirs reads that weight alone."""


def has_adapters(model: Any) -> bool:
    return isinstance(model, PeftModel)


def refuse_unknown_targets(lora: Lora, config: Any, trust_remote_code: bool) -> None:
    """Refuse a wrong name in `targets` by the architecture alone, before any weight is read."""
    if lora.targets == "all-linear":
        return
    kind = config.get_text_config().model_type
    if any(_refused_by_peft(kind, target) for target in lora.targets):
        what = f"PEFT puts no adapters on out_proj of a {kind} model"
        raise ConfigError([Problem("model.lora.targets", what, "Leave it out, or write all-linear, which does.")])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    names = _adaptable(model)
    unknown = [target for target in lora.targets if not any(_ends(name, target) for name in names)]
    if unknown or not lora.targets:
        what = f"{type(model).__name__} has no linear layer {', '.join(unknown)}" if unknown else "the list is empty"
        there = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names} - {"lm_head"}))
        raise ConfigError([Problem("model.lora.targets", what, f"Choose from: {there}. Or write all-linear.")])


OLD_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""In a mixture PEFT takes these names for those of experts before their weights were stacked, and puts its adapters there."""


def _linear_layers(model: Any) -> list[str]:
    """Names of the linear layers that can be adapted: in a mixture not those of dense layers and of shared experts."""
    mixture = bool(stacked_weights(model))
    named = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    named = [name for name in named if not _refused_by_peft(model.config.model_type, name.rsplit(".", 1)[-1])]
    return [name for name in named if not mixture or name.rsplit(".", 1)[-1] not in OLD_EXPERTS]


def _refused_by_peft(kind: str, name: str) -> bool:
    """An adapter there would be refused half-way."""
    return kind in NO_ADAPTERS_ON_OUT_PROJ and name == "out_proj"


def _adaptable(model: Any) -> list[str]:
    return _linear_layers(model) + list(stacked_weights(model))


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def add_adapters(model: Any, lora: Lora, seed: int) -> PeftModel:
    """The model with new adapters, which add nothing yet; every other weight is frozen. Each expert has its own, of this rank."""
    stacks = [name for name in stacked_weights(model) if lora.targets == "all-linear" or _named(name, lora.targets)]
    linear: str | list[str] = lora.targets
    if stacked_weights(model):
        head = model.get_output_embeddings()
        layers = [name for name in _linear_layers(model) if model.get_submodule(name) is not head]
        chosen = [name for name in layers if lora.targets == "all-linear" or _named(name, lora.targets)]
        linear = sorted({name.rsplit(".", 1)[-1] for name in chosen}) if lora.targets == "all-linear" else chosen
    settings = LoraConfig(
        r=lora.r, lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha, target_modules=linear, lora_dropout=0.0,
        bias="none", task_type="CAUSAL_LM",
        exclude_modules=["out_proj"] if _refused_by_peft(model.config.model_type, "out_proj") else None,
        target_parameters=sorted({".".join(name.split(".")[-2:]) for name in stacks}) or None,
    )  # fmt: skip
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, settings)
    stand_beside_products(adapted)
    return _as_beside_plain_weights(adapted)


def _named(name: str, targets: list[str]) -> bool:
    return any(_ends(name, target) for target in targets)


def save_adapters(model: PeftModel, folder: Path) -> None:
    """Save the adapters alone, as PEFT reads them."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a card that names this machine's folders


def load_adapters(model: Any, folder: Path) -> PeftModel:
    """The model with the adapters of a checkpoint, which can be trained further."""
    adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    stand_beside_products(adapted)
    return _as_beside_plain_weights(adapted)


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
        if isinstance(layer, ParamWrapper):
            place = next(key for key in state if _plain(key) == f"{_plain(name)}.{layer.parameter_name}")
            state[place] = merged_stack(layer)
        elif hasattr(layer, "lora_A"):
            weight = whole_weight(layer.base_layer)
            whole = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for adapter in layer.active_adapters:
                whole += layer.get_delta_weight(adapter)
            state[f"{name}.base_layer.weight"] = whole.to(
                weight.dtype
            ).cpu()  # at once: the device may have no room for all
    return {_plain(name): apart(value.cpu()) for name, value in state.items()}


def _plain(name: str) -> str:
    """The name that a weight or module had before PEFT wrapped it, once or several times."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)
