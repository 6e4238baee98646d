"""What is known of a model before its weights are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from trimtab.config.schema import Model
from trimtab.model import load


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
