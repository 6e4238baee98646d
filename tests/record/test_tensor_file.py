"""A file of tensors is what safetensors would have written, and its sum is that of the file."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimtab.record import tensor_file
from trimtab.record.tensor_file import DTYPES, write_tensors


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_safetensors(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    tensors = {f'{number}.ü"\\': torch.arange(21).view(7, 3).to(dtype) for number, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "b": torch.randn(5), "a": torch.randn(3, 2)}
    save_file(tensors, tmp_path / "theirs", metadata)
    found = write_tensors(tmp_path / "ours", tensors, metadata)
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes()
    assert found == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_tensors_are_written_by_rows_however_they_lie_and_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 24)
    tensors = {"turned": torch.randn(7, 5).T, "every other": torch.randn(9, 8)[:, ::2], "plain": torch.randn(100)}
    write_tensors(tmp_path / "file", tensors)
    loaded = load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {})
    assert load_file(tmp_path / "file") == {}
