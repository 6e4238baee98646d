"""Weights stored in fewer bits against transformers' own reading of the same checkpoints, and by hand where it has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from trimtab.base.errors import ModelError
from trimtab.config.schema import Model
from trimtab.model.load import load_config, load_model, scheme_of
from trimtab.model.quantised import from_fp8, from_mxfp4, stored_tensors
from trimtab.model.schemes import Scheme
from trimtab.model.stored import Stored
from trimtab.run.shapes import shape_of

HALF, CPU = torch.bfloat16, torch.device("cpu")
EXPERTS = (".gate_up_proj", ".down_proj")


def numbers(*shape: int, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.uint8)


def say(folder: Path, quantisation: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantisation}))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write(folder: Path, held: dict[str, torch.Tensor]) -> None:
    save_file({name: x.contiguous() for name, x in held.items()}, folder / "model.safetensors", {"format": "pt"})


def mxfp4_checkpoint(folder: Path) -> Path:
    """As gpt-oss is published: experts in four bits, everything else as it is."""
    model = tiny_model("gpt_oss", HALF, hidden_size=64, intermediate_size=32, num_hidden_layers=1)
    model.save_pretrained(folder)
    held = tensors(folder)
    for name in [name for name in held if name.endswith(EXPERTS)]:
        experts, inputs, rows = held.pop(name).shape
        held[f"{name}_blocks"] = numbers(experts, rows, inputs // 32, 16)
        held[f"{name}_scales"] = 120 + numbers(experts, rows, inputs // 32, high=9)
    write(folder, held)
    say(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]})
    return folder


def fp8_checkpoint(
    folder: Path, block: tuple[int, int] | None = (16, 16), architecture: str = "llama", **changes: Any
) -> Path:
    """As DeepSeek-V3 is published: every projection in eight bits, with a scale for each block or one for all."""
    model = tiny_model(architecture, HALF, **{"num_hidden_layers": 1, **changes})
    model.save_pretrained(folder)
    held = tensors(folder)
    for name in [name for name in held if name.endswith("_proj.weight")]:
        rows, columns = held[name].shape
        grid = (1, 1) if block is None else (-(-rows // block[0]), -(-columns // block[1]))
        held[name] = held[name].to(torch.float8_e4m3fn)
        scales = 0.5 + numbers(*grid).float() / 100
        held[f"{name}_scale_inv"] = scales.reshape(()) if block is None else scales
        held[name.replace(".weight", ".activation_scale")] = torch.tensor(1.0)
    write(folder, held)
    say(folder, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)})
    return folder


def same(found: Any, expected: Any) -> None:
    state, other = found.state_dict(), expected.state_dict()
    assert state.keys() == other.keys()
    for name, value in other.items():
        assert state[name].dtype == value.dtype == HALF
        assert torch.equal(state[name], value), name


def test_mxfp4_is_what_transformers_reads(tmp_path: Path) -> None:
    folder = mxfp4_checkpoint(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=HALF
    )
    found = load_model(Model(path=str(folder), dtype="bfloat16"), CPU)
    same(found, expected)
    assert found.get_parameter("model.layers.0.mlp.experts.gate_up_proj").abs().max() > 0


@pytest.mark.parametrize(
    ("block", "architecture", "changes"),
    [((16, 16), "llama", {}), ((16, 16), "qwen3_moe", {}), ((32, 16), "llama", {"intermediate_size": 64})],
)
def test_fp8_in_blocks_is_what_transformers_reads(
    block: Any, architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = fp8_checkpoint(tmp_path, block, architecture, **changes)
    asked = FineGrainedFP8Config(dequantize=True, weight_block_size=block)
    expected = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked, dtype=HALF)
    same(load_model(Model(path=str(folder), dtype="bfloat16"), CPU), expected)


def test_blocks_that_a_matrix_is_no_multiple_of(tmp_path: Path) -> None:
    """DeepSeek's 576 rows are four blocks and a half, which transformers 5.22 refuses."""
    folder = fp8_checkpoint(tmp_path, (20, 24))
    found, held = load_model(Model(path=str(folder), dtype="float32"), CPU).state_dict(), tensors(folder)
    name = "model.layers.0.mlp.gate_proj.weight"
    for row, column in ((0, 0), (19, 23), (20, 24), (47, 31), (39, 24)):
        scale = held[f"{name}_scale_inv"][row // 20, column // 24]
        assert found[name][row, column] == held[name][row, column].float() * scale


def test_one_scale_for_a_matrix(tmp_path: Path) -> None:
    folder = fp8_checkpoint(tmp_path, None)
    found, held = load_model(Model(path=str(folder), dtype="float32"), CPU).state_dict(), tensors(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(found[name], held[name].float() * held[f"{name}_scale_inv"])


@pytest.mark.parametrize(("strategy", "grid"), [("channel", (32, 1)), ("tensor", (1,)), ("block", (2, 2))])
def test_compressed_tensors_in_eight_bits(strategy: str, grid: tuple[int, ...], tmp_path: Path) -> None:
    tiny_model("llama", HALF, num_hidden_layers=1).save_pretrained(tmp_path)
    held, name = tensors(tmp_path), "model.layers.0.self_attn.o_proj.weight"
    held[name], held[f"{name}_scale"] = held[name].to(torch.float8_e4m3fn), (1 + numbers(*grid)).to(HALF) / 64
    write(tmp_path, held)
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "block_structure": [16, 16] if strategy == "block" else None,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    say(tmp_path, {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups})
    found = load_model(Model(path=str(tmp_path), dtype="float32"), CPU)
    scales = held[f"{name}_scale"].float()
    wide = scales.repeat_interleave(16, 0).repeat_interleave(16, 1) if strategy == "block" else scales
    assert torch.equal(found.state_dict()[name], held[name].float() * wide)
    found.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())


def group(**weights: Any) -> dict[str, Any]:
    return {
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"} | weights}}
    }


@pytest.mark.parametrize(
    ("quantisation", "told"),
    [
        ({"quant_method": "awq", "bits": 4}, r"\(awq\).*unquantised checkpoint.*GGUF.*MXFP4 \(gpt-oss\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"\(bitsandbytes\)"),
        ({"bits": 4}, r"\(of an unnamed kind\)"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "no pair of numbers"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"} | group(),
            "compressed-tensors, pack-quantized",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"} | group(num_bits=4),
            "other than 8-bit floats",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"} | group(strategy="group"),
            "with scales by group",
        ),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors, float-quantized"),
    ],
)
def test_other_ways_are_refused_by_name_with_weights_and_without(
    quantisation: dict[str, Any], told: str, tmp_path: Path
) -> None:
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    say(tmp_path, quantisation)
    for read in (load_config, scheme_of, lambda model: load_model(model, CPU), lambda model: shape_of(model.path)):
        with pytest.raises(ModelError, match=told):
            read(Model(path=str(tmp_path)))


def test_damaged_checkpoints_are_told(tmp_path: Path) -> None:
    folder = fp8_checkpoint(tmp_path)
    whole, name = tensors(folder), "model.layers.0.mlp.up_proj.weight"
    write(folder, {n: x for n, x in whole.items() if n != f"{name}_scale_inv"})
    with pytest.raises(ModelError, match=f"{name} is stored in eight bits without its scales"):
        load_model(Model(path=str(folder)), CPU)
    write(folder, whole | {f"{name}_scale_inv": torch.ones(2, 7)})
    with pytest.raises(
        ModelError, match=rf"{name} of shape \(48, 32\) has scales of shape \(2, 7\) in blocks of 16 x 16"
    ):
        load_model(Model(path=str(folder)), CPU)
    write(folder, whole | {name: whole[name].view(torch.int8)})
    with pytest.raises(ModelError, match=f"{name} has scales and is stored as int8"):
        load_model(Model(path=str(folder)), CPU)
    with pytest.raises(ModelError, match="w_blocks is stored without its scales, w_scales"):
        stored_tensors(["w_blocks"], Scheme("mxfp4"))
    with pytest.raises(ModelError, match="do not belong together"):
        from_mxfp4(numbers(2, 4, 1, 16), numbers(2, 4, 2), HALF)


def test_large_weights_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, scales = numbers(2, 6, 2, 16), 120 + numbers(2, 6, 2, high=9)
    values, grid = torch.randn(40, 24).to(torch.float8_e4m3fn), torch.rand(3, 2)
    whole = from_mxfp4(blocks, scales, torch.float32), from_fp8("w", values, grid, (16, 16), torch.float32)
    monkeypatch.setattr("trimtab.model.quantised.READ_CHUNK_ELEMENTS", 70)
    pieces = from_mxfp4(blocks, scales, torch.float32), from_fp8("w", values, grid, (16, 16), torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces))


def test_what_is_stored_can_be_taken_as_it_is(tmp_path: Path) -> None:
    """Names of values and scales, for whoever keeps them so."""
    stored = Stored(str(fp8_checkpoint(tmp_path)), scheme_of(Model(path=str(tmp_path))), HALF)
    held = tensors(tmp_path)
    (one,) = [one for one in stored.tensors if one.name == "model.layers.0.mlp.up_proj.weight"]
    assert one.parts == (one.name, f"{one.name}_scale_inv") and set(one.parts) <= held.keys()
    waiting = stored.opened()
    assert torch.equal(waiting[one.name].as_stored()[0].view(torch.uint8), held[one.name].view(torch.uint8))
