"""JSON lines on disk: every line written is strict JSON (no NaN), and a file that grows is read as it grows.

A file that is appended to can end in a torn line after a kill; `read_jsonl` leaves exactly that line out. Damage
anywhere else is an error, because neither a kill nor a full disk can cause it.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError

COMPARED_BYTES = 4096
"""Bytes before the place reached by which a replaced file is told from one that has grown."""


def finite(value: Any) -> float | int | None:
    """A number as JSON can hold it: numpy and torch scalars become floats, NaN and infinities become None."""
    if value is None:
        return None
    if not isinstance(value, int):
        value = float(value)
    return value if math.isfinite(value) else None


def dump_line(row: Mapping[str, Any], compact: bool = False) -> bytes:
    """One line, with newline. A lone surrogate becomes its JSON escape: whatever text a data set holds is written. `compact`:
    without spaces."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":") if compact else None)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def append_whole(file: io.FileIO, line: bytes) -> None:
    """All of a line, or an error and nothing of it: a full disk may take a part."""
    end, left = file.seek(0, os.SEEK_END), memoryview(line)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)
        raise


@dataclass(frozen=True)
class Damaged:
    """A line that cannot be read."""

    path: Path
    line: int
    """Counted from 1."""
    what: str

    def error(self) -> DataError:
        return DataError(f"{self.path}, line {self.line}: {self.what}. Remove the line, or move the file away")


class JsonlTail:
    """Reads a file that grows: each call of `read` gives what was appended since the last one.

    A last line that is not whole yet is left for a later call. A file that was replaced or cut off is noticed, by its inode, its
    size and the bytes before the place reached, and is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged: list[Damaged] = []
        self._forget()

    def _forget(self) -> None:
        self.offset = 0
        """Bytes read so far."""
        self._inode: int | None = None
        self._before = b""
        """The last bytes read: another file has others there."""
        self._newlines = 0
        self.damaged.clear()

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether what was read before is void, and the rows since. Lines that cannot be read are in `damaged`."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            void = self.offset > 0
            self._forget()
            return void, []
        with file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self.offset - len(self._before))
            void = self.offset > 0 and (inode != self._inode or file.read(len(self._before)) != self._before)
            if void:
                self._forget()
                file.seek(0)
            self._inode = inode
            data = file.read()
        return void, self._rows(data)

    def _rows(self, data: bytes) -> list[dict[str, Any]]:
        *whole, last = data.split(b"\n")
        rows = []
        for number, line in enumerate(whole, start=self._newlines + 1):
            if line:
                row = _parse(line)
                if isinstance(row, dict):
                    rows.append(row)
                else:
                    self.damaged.append(Damaged(self.path, number, row))
        row = _parse(last) if last else ""
        if isinstance(row, dict):  # whole but for its newline: nothing that is longer begins with it
            rows.append(row)
            last = b""
        end = len(data) - len(last)
        self.offset += end
        self._before = (self._before + data[:end])[-COMPARED_BYTES:]
        self._newlines += len(whole)
        return rows


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole rows; none when there is no file. Safe to call while another process appends."""
    tail = JsonlTail(path)
    _, rows = tail.read()
    if tail.damaged:
        raise tail.damaged[0].error()
    return rows


def _parse(line: bytes) -> dict[str, Any] | str:
    """A row, or what is wrong with the line."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error})"
    except RecursionError:
        return "the JSON is nested too deeply"
    return row if isinstance(row, dict) else "not a JSON object"
