"""JSON lines on disk: every line written is strict JSON (no NaN), and a file replaced is replaced whole or not at all.

A file that is appended to can end in a torn line after a kill; `read_jsonl` leaves exactly that line out. Damage
anywhere else is an error, because neither a kill nor a full disk can cause it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError


def finite(value: Any) -> float | int | None:
    """A number as JSON can hold it: numpy and torch scalars become floats, NaN and infinities become None."""
    if value is None:
        return None
    if not isinstance(value, int):
        value = float(value)
    return value if math.isfinite(value) else None


def dump_line(row: Mapping[str, Any]) -> bytes:
    """One line, with newline. A lone surrogate becomes its JSON escape: whatever text a data set holds is written."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write aside, then rename: a reader sees the old file or the new one, never a part."""
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole rows; none when there is no file. Safe to call while another process appends."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: the writer was killed, or is writing now
                break
            raise _damaged(path, number, f"not JSON ({error})") from error
        except RecursionError as error:
            raise _damaged(path, number, "lists or objects are nested too deeply") from error
        if not isinstance(row, dict):
            raise _damaged(path, number, "not an object with names and values")
        rows.append(row)
    return rows


def _damaged(path: Path, number: int, what: str) -> DataError:
    return DataError(f"{path}, line {number}: {what}. Remove the line, or move the file away to go on without it")
