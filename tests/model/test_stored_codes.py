"""Checkpoints in codes, written here as their libraries document them, are read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from trimtab.base.errors import ModelError
from trimtab.config.schema import Model
from trimtab.model.codes import NF4, QuantisedLinear, codes_of, quantised
from trimtab.model.load import load_config, load_model, save_model
from trimtab.model.stored_codes import holds_plain_layers
from trimtab.plan.source import stored_codes

CPU = torch.device("cpu")


@pytest.mark.parametrize(("kind", "plain"), [("llama", True), ("bamba", False), ("lfm2", False)])
def test_layers_that_carry_a_state_are_not_kept_in_codes(kind: str, plain: bool) -> None:
    """Their own kernels read the weights as they are."""
    assert holds_plain_layers(SimpleNamespace(model_type=kind)) is plain


def checkpoint(folder: Path, kind: str, nested: bool = False) -> dict[str, torch.Tensor]:
    """A tiny Qwen2 in codes; returns what its layers' weights stand for, by name."""
    save_model(tiny_model("qwen2"), tiny_tokenizer(), folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    stand_for = {}
    for name, module in plain.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        made: Any = quantised(module, "fp8" if kind == "fp8" else "4bit")
        key = f"{name}.weight"
        if kind == "fp8":
            state[key] = made.weight.data.view(torch.float8_e4m3fn)
            state[f"{key}_scale_inv"] = made.scale.data
            stand_for[key] = made.dequantised(torch.float32)
            continue
        state[key] = made.weight.data[:, None]
        facts = {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": "float32",
            "shape": [made.out_features, made.in_features],
        }
        scale = made.scale.data
        if nested:
            offset = float(scale.mean())
            table = torch.linspace(-1, 1, 256)
            most = torch.stack([part.abs().max() for part in (scale - offset).split(256)])
            relative = (scale - offset) / most.repeat_interleave(256)[: len(scale)]
            codes = (relative[:, None] - table).abs().argmin(1).to(torch.uint8)
            state |= {f"{key}.absmax": codes, f"{key}.nested_absmax": most, f"{key}.nested_quant_map": table}
            facts |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            made.scale.data = table[codes.int()] * most.repeat_interleave(256)[: len(scale)] + offset
        else:
            state[f"{key}.absmax"] = scale
        state[f"{key}.quant_map"] = torch.tensor(NF4)
        state[f"{key}.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(facts).encode()), dtype=torch.uint8
        )
        stand_for[key] = made.dequantised(torch.float32)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        if kind == "fp8"
        else {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return stand_for


def read(folder: Path, **settings: Any) -> Any:
    return load_model(Model.model_validate({"path": str(folder), "dtype": "float32", **settings}), CPU)


@pytest.mark.parametrize(("kind", "nested"), [("fp8", False), ("4bit", False), ("4bit", True)])
def test_codes_stay_as_they_are_under_adapters(tmp_path: Path, kind: str, nested: bool) -> None:
    stand_for = checkpoint(tmp_path, kind, nested)
    assert stored_codes(str(tmp_path)) == kind
    found = read(tmp_path, lora={"r": 2})
    assert codes_of(found) == kind
    layers = {f"{n}.weight": m for n, m in found.named_modules() if isinstance(m, QuantisedLinear)}
    assert layers.keys() == stand_for.keys()
    for name, layer in layers.items():
        torch.testing.assert_close(layer.dequantised(), stand_for[name], rtol=1e-6, atol=1e-7)
    plain = AutoModelForCausalLM.from_config(load_config(Model(path=str(tmp_path), base="bf16")))
    plain.load_state_dict(read(tmp_path, base="bf16").state_dict())
    tokens = torch.arange(3, 12)[None]
    torch.testing.assert_close(found(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-5)
    assert codes_of(read(tmp_path, base="4bit" if kind == "fp8" else "fp8", lora={"r": 2})) != kind


def test_without_adapters_it_says_what_to_write(tmp_path: Path) -> None:
    checkpoint(tmp_path, "4bit")
    with pytest.raises(ModelError, match=r"Set model.lora .* or model.base: bf16"):
        load_config(Model(path=str(tmp_path)))


def test_codes_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, "fp8")
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="up_proj"):
        read(tmp_path, lora={"r": 2})
