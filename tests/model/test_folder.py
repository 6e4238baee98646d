"""A model's folder in pieces is the folder that `save_model` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model

from trimtab.config.schema import Lora
from trimtab.model.adapters import add_adapters, save_adapters
from trimtab.model.folder import WEIGHTS_METADATA, as_stored, other_files, stored_weights, weights_file
from trimtab.model.load import save_model
from trimtab.model.weights import WeightStore
from trimtab.record.part import collect, deal, shard_name
from trimtab.record.tensor_file import write_tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("mixtral", {"num_local_experts": 4})],
)
def test_a_model(tmp_path: Path, tokenizer: Any, kind: str, settings: dict[str, Any]) -> None:
    model = tiny_model(kind, **settings)
    WeightStore(model.named_parameters())
    save_model(model, tokenizer, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    write_tensors(tmp_path / "ours" / weights_file(model), as_stored(model, stored_weights(model)), WEIGHTS_METADATA)
    for name, data in other_files(model, tokenizer).items():
        (tmp_path / "ours" / name).write_bytes(data)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


@pytest.mark.parametrize(("kind", "settings"), [("llama", {"tie_word_embeddings": True}), ("mixtral", {})])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_in_shares(kind: str, settings: dict[str, Any], ranks: int) -> None:
    """Each unit by itself is stored as it is within the whole: nothing twice, nothing left out."""
    model = tiny_model(kind, **settings)
    optimizer = _NoState(WeightStore(model.named_parameters()))
    whole = as_stored(model, stored_weights(model))
    shares = [collect(model, optimizer, None, None, rank, ranks) for rank in range(ranks)]  # type: ignore[arg-type]
    files = [share.files[shard_name("model.safetensors", rank, ranks)] for rank, share in enumerate(shares)]
    stored = [as_stored(model, file.tensors) for file in files]
    assert sum(len(share) for share in stored) == len(whole)
    together = {name: tensor for share in stored for name, tensor in share.items()}
    assert together.keys() == whole.keys() and all(torch.equal(together[name], whole[name]) for name in whole)


class _NoState:
    def __init__(self, weights: WeightStore) -> None:
        self.weights = weights

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def table(self) -> list[Any]:
        return []

    def stretches(self) -> dict[str, tuple[int, int]]:
        return {}


def test_adapters(tmp_path: Path, tokenizer: Any) -> None:
    model = add_adapters(tiny_model(), Lora(r=2), seed=0)
    save_adapters(model, tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    write_tensors(tmp_path / "ours" / weights_file(model), as_stored(model, stored_weights(model)), WEIGHTS_METADATA)
    for name, data in other_files(model, tokenizer).items():
        (tmp_path / "ours" / name).write_bytes(data)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_dealing_is_even_and_the_same_for_everybody() -> None:
    sizes = {f"unit {number}": size for number, size in enumerate([100, 10, 10, 10, 50, 50, 70])}
    dealt = deal(sizes, 3)
    assert dealt == deal(dict(reversed(sizes.items())), 3)
    loads = [sum(size for name, size in sizes.items() if dealt[name] == rank) for rank in range(3)]
    assert max(loads) <= 110 and sum(loads) == 300
