"""Checkpoints whose weights are stored in codes already, read as they are: FP8 with blocks of scales (`quant_method: fp8`, as
transformers and DeepSeek write it), and bitsandbytes' 4 bits (`quant_method: bitsandbytes`), its absolute maxima quantised again
or not.

The layers of the decoder stay in codes; whatever else is in codes is read as what they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from trimtab.base.errors import ModelError
from trimtab.model.codes import Kind, QuantisedLinear, put, quantised_names
from trimtab.model.context import HYBRIDS
from trimtab.model.sizes import FOUR_BIT_BLOCK, FP8_BLOCK

FP8_SCALE = "_scale_inv"
BNB_STATE = ".quant_state.bitsandbytes__"
NOTHING_LIKE_IT = "Use the model's unquantised checkpoint, or its GGUF file, which is dequantised on loading."


def kind_stored(settings: Any) -> Kind | None:
    """How a checkpoint stores its weights, by its `quantization_config`; None for plain ones and for codes that are not read."""
    if settings is None:
        return None
    found = settings if isinstance(settings, Mapping) else settings.to_dict()
    method = str(found.get("quant_method", ""))
    if method == "fp8":
        return "fp8"
    four = found.get("load_in_4bit") or found.get("_load_in_4bit")
    return "4bit" if method == "bitsandbytes" and four else None


def holds_plain_layers(config: Any) -> bool:
    """The model is a language model alone, and its layers are plain linear ones: no experts, no latent attention, no state."""
    if config.model_type in HYBRIDS:
        return False
    stacks = ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank")
    return getattr(config, "text_config", None) is None and not any(getattr(config, name, None) for name in stacks)


def load_stored(folder: Path, config: Any, settings: Any, dtype: torch.dtype, plain: bool) -> Any:
    """The model of a folder on the host: its layers in the folder's codes, or with `plain` none. `config`: without a trace of
    codes; `settings`: its former `quantization_config`."""
    tensors = _Tensors(folder)
    block = _block(settings)
    state: dict[str, torch.Tensor] = {}
    coded: dict[str, QuantisedLinear] = {}
    for name in tensors.weights():
        layer = tensors.layer(name, dtype, block)
        if layer is None:
            state[name] = tensors[name]
        elif plain or not _in_decoder(name):
            state[name] = layer.dequantised()
        else:
            coded[name.removesuffix(".weight")] = layer
            state[name] = torch.zeros((), dtype=dtype).expand(layer.out_features, layer.in_features)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    model, report = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    with suppress(OSError):  # few models have none
        model.generation_config = GenerationConfig.from_pretrained(folder)
    wrong = sorted({*report["missing_keys"], *(coded.keys() - set(quantised_names(model)))})
    if wrong:
        what = f"has other weights than a {type(model).__name__}, such as {wrong[0]}"
        raise ModelError(f"model.path: {folder} {what}. {NOTHING_LIKE_IT}")
    for name, layer in coded.items():
        bias = model.get_submodule(name).bias
        if bias is not None:
            layer.bias = torch.nn.Parameter(bias.data, requires_grad=False)
        put(model, name, layer)
    return model


def folder_of(location: str) -> Path:
    """A local folder, or that of a hub repository's files in the cache."""
    if Path(location).is_dir():
        return Path(location)
    return Path(snapshot_download(location, allow_patterns=["*.safetensors", "*.json"]))


def _in_decoder(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))


def _block(settings: Any) -> tuple[int, int]:
    found = settings if isinstance(settings, Mapping) else settings.to_dict()
    rows, columns = found.get("weight_block_size") or (FP8_BLOCK, FP8_BLOCK)
    return int(rows), int(columns)


class _Tensors:
    """The tensors of a folder's files, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = safe_open(file, framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._files[name].get_tensor(name)
        return found

    def weights(self) -> Iterator[str]:
        """Names of tensors that a plain model has, too."""
        beside = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".activation_scale", FP8_SCALE)
        for name in self._files:
            if not name.endswith(beside) and BNB_STATE not in name:
                yield name

    def layer(self, name: str, dtype: torch.dtype, block: tuple[int, int]) -> QuantisedLinear | None:
        """The linear layer of a weight in codes, without a bias; None for a plain tensor."""
        if name + FP8_SCALE in self._files:
            return self._fp8(name, dtype, block)
        described = next((key for key in self._files if key.startswith(name + BNB_STATE)), None)
        return None if described is None else self._four_bit(name, described, dtype)

    def _fp8(self, name: str, dtype: torch.dtype, block: tuple[int, int]) -> QuantisedLinear:
        codes, scale = self[name], self[name + FP8_SCALE].float()
        if codes.dtype is not torch.float8_e4m3fn or scale.ndim not in (0, 2):
            raise ModelError(f"model.path: {self._folder} stores {name} in a way that is not read. {NOTHING_LIKE_IT}")
        shape = (codes.shape[0], codes.shape[1])
        if scale.numel() == 1:
            scale, block = scale.view(1, 1), shape
        return QuantisedLinear("fp8", shape, codes.view(torch.uint8), scale, None, dtype, block=block)

    def _four_bit(self, name: str, described: str, dtype: torch.dtype) -> QuantisedLinear:
        facts = json.loads(bytes(self[described].tolist()))
        scale = self[f"{name}.absmax"]
        if f"{name}.nested_absmax" in self._files:
            inner = self[f"{name}.nested_absmax"].repeat_interleave(int(facts["nested_blocksize"]))[: scale.numel()]
            scale = self[f"{name}.nested_quant_map"][scale.int()] * inner + facts["nested_offset"]
        if facts["blocksize"] != FOUR_BIT_BLOCK:
            what = f"stores {name} in blocks of {facts['blocksize']}; {FOUR_BIT_BLOCK} are read"
            raise ModelError(f"model.path: {self._folder} {what}. {NOTHING_LIKE_IT}")
        outputs, inputs = facts["shape"]
        levels = self[f"{name}.quant_map"].float()
        codes = self[name].flatten()
        return QuantisedLinear("4bit", (outputs, inputs), codes, scale.float(), None, dtype, levels)
