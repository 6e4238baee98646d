"""Scores that were given before: bounded in memory, and on disk where asked for.

The newest and most recently used `MAX_SCORES` scores are kept. On disk they are lines of JSON, each appended in one write; a
line that is torn or damaged is left out when the file is read, and a file that has grown too long is then replaced whole. Only
one process writes it: a run folder belongs to one run.
"""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from pathlib import Path

from trimtab.base.files import write_file

MAX_SCORES = 65_536
FILE = "judge-cache.jsonl"


class ScoreCache:
    """From the digest of a request to its score."""

    def __init__(self, folder: Path | None = None, limit: int = MAX_SCORES) -> None:
        """`folder`: where the file is. It may come into being later; what is put before that stays in memory."""
        self._limit = limit
        self._scores: OrderedDict[str, float] = OrderedDict()
        self._path = folder / FILE if folder else None
        self._file: int | None = None
        if self._path and self._path.exists():
            self._read(self._path)

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, digest: str) -> float | None:
        if digest in self._scores:
            self._scores.move_to_end(digest)
        return self._scores.get(digest)

    def put(self, digest: str, score: float) -> None:
        self._keep(digest, score)
        if self._path and self._path.parent.is_dir():
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(self._file, _line(digest, score))

    def _keep(self, digest: str, score: float) -> None:
        self._scores[digest] = score
        self._scores.move_to_end(digest)
        while len(self._scores) > self._limit:
            self._scores.popitem(last=False)

    def _read(self, path: Path) -> None:
        lines = path.read_bytes().split(b"\n")
        for line in lines:
            if entry := _entry(line):
                self._keep(*entry)
        if lines[-1] or len(lines) > 2 * self._limit:  # torn at its end, or grown: what is appended begins a line
            write_file(path, (_line(digest, score) for digest, score in self._scores.items()))


def _line(digest: str, score: float) -> bytes:
    return json.dumps({"request": digest, "score": score}).encode() + b"\n"


def _entry(line: bytes) -> tuple[str, float] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    digest, score = (row.get("request"), row.get("score")) if isinstance(row, dict) else (None, None)
    if not isinstance(digest, str) or not isinstance(score, int | float) or isinstance(score, bool):
        return None
    return (digest, float(score)) if math.isfinite(score) else None
