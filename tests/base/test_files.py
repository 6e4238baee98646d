"""A file or folder that is replaced is whole: the old one or the new one, whatever happens between."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimtab.base import files
from trimtab.base.files import aside_of, clear, put_in_place, write_file, write_json, write_text


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "one")
    write_text(tmp_path / "a", "zwölf")
    write_json(tmp_path / "b.json", {"x": [1]}, indent=1)
    write_file(tmp_path / "c", (part for part in (b"1\n", b"2\n")), shared=True)
    assert held(tmp_path) == {"a": "zwölf", "b.json": '{\n "x": [\n  1\n ]\n}\n', "c": "1\n2\n"}


def test_what_a_kill_left_aside_is_gone_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".a.writing").write_text("half")
    write_text(tmp_path / "a", "whole")
    assert held(tmp_path) == {"a": "whole"}


def failing() -> Iterator[bytes]:
    yield b"half"
    raise OSError(28, "No space left on device")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a", failing())
    assert held(tmp_path) == {"a": "old"}


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("flush"), fsync(handle)))
    monkeypatch.setattr(Path, "rename", lambda path, target: (order.append("rename"), rename(path, target))[1])
    write_text(tmp_path / "a", "x")
    assert order == ["flush", "rename"]


def test_a_shared_file_is_written_aside_by_each_process_for_itself(tmp_path: Path, monkeypatch) -> None:
    """The name of another process's file aside is not used."""
    monkeypatch.setattr(files.os, "getpid", lambda: 1)
    (tmp_path / ".a.2.writing").write_text("another's")
    write_text(tmp_path / "a", "mine", shared=True)
    assert held(tmp_path) == {"a": "mine", ".a.2.writing": "another's"}


def test_a_folder_is_put_in_place_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "final"
    for text in ("one", "two"):
        aside = aside_of(target)
        aside.mkdir()
        (aside / "model").write_text(text)
        put_in_place(aside, target)
        assert held(target) == {"model": text} and list(tmp_path.iterdir()) == [target]


def test_what_was_left_half_written_or_half_deleted_is_cleared(tmp_path: Path) -> None:
    for name in (".writing-step-1", ".deleting-step-2", "step-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").touch()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
