"""What was appended to a file since a place in it that a browser names, also after it had lost the connection.

Guarantees: only whole lines are given, each once and in order. A file that was replaced or cut off since, by inode, size or the
bytes before the place, is noticed, and is then read from its beginning.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from zlib import crc32

from trimtab.record.jsonl import finite

COMPARED_BYTES = 512
"""Bytes before a place by which a replaced file is told from one that has grown."""
BLOCK_BYTES = 1 << 20
"""Bytes that one call reads, unless a single line is longer."""
MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class Mark:
    """A place in a file: the byte after a line's end, and what tells that the file is still the same."""

    offset: int = 0
    inode: int = 0
    before: int = 0
    """Checksum of the bytes before the offset."""

    def __str__(self) -> str:
        return f"{self.offset}-{self.inode:x}-{self.before:x}"


def parse_mark(text: str) -> Mark | None:
    """The place that a browser names; None for what no server wrote."""
    found = re.fullmatch(r"(\d{1,18})-([0-9a-f]{1,16})-([0-9a-f]{1,8})", text)
    return Mark(int(found[1]), int(found[2], 16), int(found[3], 16)) if found else None


class LineTail:
    """Lines of a file from a place on."""

    def __init__(self, path: Path, mark: Mark | None = None) -> None:
        self.path, self.mark = path, mark or Mark()
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> tuple[bool, list[bytes]]:
        """Whether what was given before is void, and whole lines since, without their ends. A file that is not there is empty."""
        try:
            state = self.path.stat()
            seen = (state.st_size, state.st_mtime_ns, state.st_ino)
            if not stat.S_ISREG(state.st_mode):  # a pipe would make everybody wait
                return False, []
            if seen == self._seen and state.st_size == self.mark.offset:
                return False, []
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                void = self.mark.offset > 0 and (inode != self.mark.inode or self._before(file) != self.mark.before)
                if void:
                    self.mark = Mark()
                file.seek(self.mark.offset)
                data = file.read(BLOCK_BYTES)
                while data and b"\n" not in data and len(data) < MAX_LINE_BYTES and (more := file.read(BLOCK_BYTES)):
                    data += more
                end = data.rfind(b"\n") + 1
                self.mark = Mark(self.mark.offset + end, inode)
                self.mark = Mark(self.mark.offset, inode, self._before(file))
        except FileNotFoundError:
            void, self.mark, self._seen = self.mark.offset > 0, Mark(), None
            return void, []
        self._seen = seen
        return void, data[:end].split(b"\n")[:-1] if end else []

    def to_end(self, less_bytes: int = 0) -> None:
        """Go on from the end of the last whole line, or from the first line's end after so many bytes before it."""
        try:
            with self.path.open("rb") as file:
                inode, size = os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_size
                offset = _line_start(file, size - less_bytes) if less_bytes else _last_line_end(file, size)
                self.mark = Mark(offset, inode)
                self.mark = Mark(offset, inode, self._before(file))
        except FileNotFoundError:
            self.mark = Mark()

    def lines_before(self, most_bytes: int) -> list[bytes]:
        """Whole lines before the place, of at most so many bytes; none where the file has changed or gone."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != self.mark.inode or self._before(file) != self.mark.before:
                    return []
                start = _line_start(file, self.mark.offset - most_bytes)
                file.seek(start)
                return file.read(self.mark.offset - start).split(b"\n")[:-1]
        except FileNotFoundError:
            return []

    def _before(self, file: IO[bytes]) -> int:
        return _checksum(file, self.mark.offset)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line's object, with None for numbers that are not finite; None where it cannot be read: a run's data tells of damage."""
    try:
        row = json.loads(line, parse_constant=lambda _: None, parse_float=lambda text: finite(float(text)))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _checksum(file: IO[bytes], offset: int) -> int:
    start = max(0, offset - COMPARED_BYTES)
    file.seek(start)
    return crc32(file.read(offset - start))


def _line_start(file: IO[bytes], offset: int) -> int:
    """The first line's start at or after an offset."""
    if offset <= 0:
        return 0
    file.seek(offset - 1)
    skipped = file.readline()
    return offset - 1 + len(skipped) if skipped.endswith(b"\n") else _last_line_end(file, offset)


def _last_line_end(file: IO[bytes], size: int) -> int:
    """The end of the last whole line of the first so many bytes."""
    while size > 0:
        start = max(0, size - BLOCK_BYTES)
        file.seek(start)
        found = file.read(size - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        size = start
    return 0
