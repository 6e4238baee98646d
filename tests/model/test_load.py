"""What is known of a model before its weights are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from trimtab.base.errors import ModelError
from trimtab.config.schema import Model
from trimtab.model import load
from trimtab.run.shapes import shape_of


def test_a_gguf_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[dict[str, Any]] = []

    def reading(location: str, **options: Any) -> LlamaConfig:
        read.append({"location": location, **options})
        return LlamaConfig(vocab_size=100 + len(read))

    monkeypatch.setattr(load.AutoConfig, "from_pretrained", reading)
    monkeypatch.setattr(load, "_require_gguf", lambda: None)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1")
    model = Model(path=str(file))
    first, second = load.load_config(model), load.load_config(model)
    assert read == [{"location": str(tmp_path), "gguf_file": "model.gguf"}]
    first.vocab_size = 7  # whoever changes it changes his own
    assert second.vocab_size == 101
    os.utime(file, ns=(1, 1))
    assert load.load_config(model).vocab_size == 102
    file.write_bytes(b"more")
    os.utime(file, ns=(1, 1))
    assert load.load_config(model).vocab_size == 103


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a run; no hub is asked for anything that can only be here."""
    for folder in ("qwen-small", "runs/mine/final", "runs/mine/checkpoints/step-9", "runs/mine/checkpoints/step-10"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "weights.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)

    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(load.AutoConfig, "from_pretrained", asked)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs/mine", "has no config.json, so it is not a Hugging Face model folder. Did you mean runs/mine/final?"),
        (
            "runs/mien/final",
            "no model folder at {here}/runs/mien/final. There is no folder {here}/runs/mien. Did you mean 'mine'?",
        ),
        ("runs/mien", "no model folder at {here}/runs/mien. Did you mean 'mine'? Give a folder"),
        ("rnus/mine/final", "There is no folder {here}/rnus. Did you mean 'runs'?"),
        ("./qwen-smal", "no model folder at {here}/qwen-smal. Did you mean 'qwen-small'?"),
        ("qwen-small/x", "no model folder at {here}/qwen-small/x."),
        ("checkpoints/step-3", "no model folder at {here}/checkpoints/step-3."),
        ("mine/final", "no model folder at {here}/mine/final."),
        ("my model", "no model folder at {here}/my model."),
        ("weihgts.gguf", "no GGUF file at {here}/weihgts.gguf. Did you mean 'weights.gguf'?"),
    ],
)
def test_what_no_hub_can_have_is_looked_for_here_alone(shelf: Path, path: str, message: str) -> None:
    for read in (load.load_config, load.refuse_without_weights, load.load_tokenizer):
        with pytest.raises(ModelError) as error:
            read(Model(path=path))
        assert message.format(here=shelf) in str(error.value)
    with pytest.raises(ModelError, match=r"^model\.tokenizer: "):
        load.load_tokenizer(Model(path="runs/mine/final", tokenizer=path))


def test_a_plan_asks_no_hub_for_it_either(shelf: Path) -> None:
    with pytest.raises(ModelError, match=rf"There is no folder {shelf}/runs/mien\. Did you mean 'mine'\?"):
        shape_of("runs/mien")


def test_the_newest_checkpoint_of_a_run_without_a_final_model_is_meant(shelf: Path) -> None:
    (shelf / "runs/mine/final/config.json").unlink()
    with pytest.raises(ModelError, match=r"Did you mean runs/mine/checkpoints/step-10\?"):
        load.find_source("runs/mine")


@pytest.mark.parametrize("path", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "org/name_1.0-x"])
def test_hub_names_are_asked_for_and_what_is_near_here_is_named(shelf: Path, path: str) -> None:
    assert load.find_source(path) == load.ModelSource(path)
    assert (
        load.find_source("qwen-smal").also == f"There is no folder {shelf}/qwen-smal either. Did you mean 'qwen-small'?"
    )


@pytest.mark.parametrize(
    "held",
    [
        "[]",
        "{",
        '"x"',
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        f'{{"weight_map": {{"a": "{"x" * 5000}"}}}}',
        "[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_index_of_weights_is_told(tmp_path: Path, held: str | bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(held if isinstance(held, bytes) else held.encode())
    with pytest.raises(ModelError, match=r"index\.json is damaged: it.*Download it again"):
        load.refuse_without_weights(Model(path=str(tmp_path)))


def test_an_index_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(ModelError, match="is damaged"):
        load.refuse_without_weights(Model(path=str(tmp_path)))


def test_stop_tokens_are_those_of_the_loaded_model(model_folder: Path, tokenizer: Any) -> None:
    model = Model(path=str(model_folder))
    loaded = load.load_model(model, torch.device("cpu"))
    assert load.declared_stops(model, tokenizer) == load.stop_token_ids(loaded, tokenizer) == [2]


def test_stop_tokens_of_the_generation_config_are_declared(model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    model = Model(path=str(tmp_path))
    loaded = load.load_model(model, torch.device("cpu"))
    assert load.declared_stops(model, tokenizer) == load.stop_token_ids(loaded, tokenizer) == [2, 7]
