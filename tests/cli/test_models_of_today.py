"""Checkpoints as they are published today, through the commands: a model that also sees, and weights in fewer bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.model.test_quantised import fp8_checkpoint, mxfp4_checkpoint, say
from tests.model.test_text_part import tiny_seeing

Trimtab = Callable[..., Any]
NEW = ("data.max_prompt_tokens=16", "learn.max_new_tokens=6")


def with_tokenizer(folder: Path) -> str:
    tiny_tokenizer().save_pretrained(folder)
    return f"model.path={folder}"


@pytest.fixture
def seeing(here: Path) -> str:
    tiny_seeing("gemma3").save_pretrained(here / "seeing")
    return with_tokenizer(here / "seeing")


def vision(model: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if "vision" in name or "projector" in name}


def test_a_model_that_also_sees_is_trained_resumed_and_exported_whole(
    trimtab: Trimtab, here: Path, seeing: str
) -> None:
    for command, *more in (("plan",), ("train", "--dry-run")):
        found = trimtab(command, seeing, *NEW, *more)
        assert found.code == 0, found.err
    assert trimtab("train", seeing, *NEW, "learn.steps=1", "learn.lr=0.05", "observe.checkpoint_every=1").code == 0
    found = trimtab("train", seeing, *NEW, "learn.steps=2", "learn.lr=0.05", "observe.checkpoint_every=1", "--resume")
    assert found.code == 0, found.err
    before, run = AutoModelForImageTextToText.from_pretrained(here / "seeing"), here / "runs/it"
    assert trimtab("export", "out", on="runs/it").code == 0
    for folder in (run / "final", here / "out"):
        after = AutoModelForImageTextToText.from_pretrained(folder)
        assert type(after) is type(before)
        assert vision(before) and all(torch.equal(p, vision(after)[name]) for name, p in vision(before).items())
        trained, old = after.get_decoder().state_dict(), before.get_decoder().state_dict()
        assert any(not torch.equal(value, old[name]) for name, value in trained.items())
    text = AutoModelForCausalLM.from_pretrained(run / "checkpoints/step-2")
    assert type(text).__name__ == "Gemma3ForCausalLM"
    assert all(torch.equal(value, trained[name]) for name, value in text.get_decoder().state_dict().items())


def test_rows_with_images_are_refused_before_anything_is_loaded(trimtab: Trimtab, here: Path, seeing: str) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "What is this?", "answer": "a cat", "images": ["cat.png"]}]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for arguments in ((), ("--dry-run",)):
        found = trimtab("train", seeing, *NEW, *arguments)
        assert (
            found.code != 0
            and "row 2 (from 1), column 'images' holds an image. Trimtab trains on text alone" in found.err
        )


@pytest.mark.parametrize("make", [fp8_checkpoint, mxfp4_checkpoint])
def test_quantised_checkpoints_are_trained(trimtab: Trimtab, here: Path, make: Callable[[Path], Path]) -> None:
    model = with_tokenizer(make(here / "stored"))
    found = trimtab("train", model, *NEW, "learn.steps=1")
    assert found.code == 0, found.err
    final = AutoModelForCausalLM.from_pretrained(here / "runs/it/final")
    assert final.dtype == torch.float32 and not hasattr(final.config, "quantization_config")


def test_a_model_that_fits_nowhere_once_it_is_dequantised_is_refused_before_it_is_read(
    trimtab: Trimtab, here: Path
) -> None:
    folder = here / "large"
    config = tiny_model("llama").config
    config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim = 16384, 2**20, 24, 4096
    config.save_pretrained(folder)
    say(folder, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    (folder / "model.safetensors").write_bytes(b"nothing that could be read")
    model = with_tokenizer(folder)
    told = "model.path: the weights are stored in FP8 in blocks of 128 x 128 and are dequantised on loading: 1,"
    for command, *more in (("plan",), ("train", "--dry-run"), ("train",)):
        found = trimtab(command, model, *NEW, *more)
        assert found.code != 0 and "are dequantised on loading" in found.err, (command, found.err)
        assert told[:90] in found.err and "GiB, and the host has" in found.err
