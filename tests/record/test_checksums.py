"""Files that are not what was written are named, with what became of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trimtab.record.checksums import refuse_other_files, sums_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"a.bin": "abcd", "b.bin": "efgh", "sub/c.bin": "ijkl"}.items():
        (tmp_path / "now" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "now" / name).write_text(text)
    return tmp_path / "now"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def test_sizes_and_hashes_by_path(folder: Path) -> None:
    found = sums_of(folder)
    assert list(found) == ["a.bin", "b.bin", "sub/c.bin"]
    assert found["a.bin"] == {
        "bytes": 4,
        "sha256": "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589",
    }
    refuse_other_files(folder, found, {})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            lambda f: flip(f / "a.bin"),
            r"^a\.bin was changed or damaged after it was written: its sha256 differs$",
        ),
        (lambda f: os.truncate(f / "a.bin", 3), r"^a\.bin has 3 bytes, but was written with 4$"),
        (lambda f: (f / "sub/c.bin").unlink(), r"^sub/c\.bin is missing$"),
        (
            lambda f: swap(f / "a.bin", f / "b.bin"),
            r"^a\.bin has the contents of b\.bin; b\.bin has the contents of a\.bin$",
        ),
        (lambda f: (f / "a.bin").write_text("ABCD"), r"^a\.bin has the contents of step-1/a\.bin$"),
        (lambda f: (f / "a.bin").write_text("WXYZ"), r"^a\.bin has the contents of step-1/z\.bin$"),
    ],
)
def test_what_happened_to_a_file_is_told(folder: Path, damage, told: str) -> None:
    before = folder.parent / "step-1"
    before.mkdir()
    (before / "a.bin").write_text("ABCD")
    (before / "z.bin").write_text("WXYZ")
    written = sums_of(folder)
    damage(folder)
    with pytest.raises(ValueError, match=told):
        refuse_other_files(folder, written, {"step-1": sums_of(before)})


def test_files_that_somebody_added_are_left_alone(folder: Path) -> None:
    written = sums_of(folder)
    (folder / "notes.txt").write_text("the good one")
    refuse_other_files(folder, written, {})
