"""Files and folders that are whole or not there: written aside, flushed to disk, renamed. A kill, a full disk or a power cut
leaves the old one or the new one, never half of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_file(path: Path, chunks: Iterable[bytes], shared: bool = False) -> None:
    """Replace a file. `shared`: several processes may write it at the same time; the last one counts."""
    own = f".{os.getpid()}" if shared else ""
    aside = path.with_name(f".{path.name}{own}.writing")
    try:
        with aside.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, shared: bool = False) -> None:
    """Replace a text file, in UTF-8."""
    write_file(path, [text.encode()], shared)


def write_json(path: Path, value: Any, indent: int = 2, shared: bool = False) -> None:
    """Replace a file by one JSON value."""
    write_text(path, json.dumps(value, indent=indent) + "\n", shared)


def aside_of(folder: Path) -> Path:
    """Where a folder is written until it is whole: beside it, so that a rename puts it in place."""
    return folder.with_name(f".writing-{folder.name}")


def put_in_place(aside: Path, target: Path) -> None:
    """Rename a folder that is written to what it is called, when all of it is on disk; what was there before is deleted."""
    flush_to_disk(aside)
    away = _rename_away(target) if target.exists() else None
    aside.rename(target)
    fsync(target.parent)
    if away is not None:
        shutil.rmtree(away)


def remove_whole(folder: Path) -> None:
    """Delete a folder so that it is never seen half deleted under its name."""
    shutil.rmtree(_rename_away(folder))


def clear(folder: Path) -> None:
    """Remove folders in it that a killed process left half written or half deleted."""
    for leftover in [*folder.glob(".writing-*"), *folder.glob(".deleting-*")]:
        shutil.rmtree(leftover)


def flush_to_disk(folder: Path) -> None:
    """Have all files of a folder, and the folders' own entries, on disk."""
    for path in (*folder.rglob("*"), folder):
        fsync(path)


def fsync(path: Path) -> None:
    """What was written to a file, or a folder's entries, outlives the machine's end."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename_away(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".deleting-{folder.name}"))
