"""Completions that hold a text, newest first, in pages.

A request searches for at most two seconds and then says where to go on: the cursor is the place of the next line, so that no line
is searched twice or left out, whatever is written meanwhile. A text is looked for in the file's bytes, and only lines that
hold it are parsed. A regular expression is looked for in what was parsed, with a limit on the time for each line: no pattern
can keep the server busy. Letters from a to z match in either case."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex

from trimtab.base.errors import DataError
from trimtab.observe.web.server.samples import KINDS, recorded_steps, step_file
from trimtab.observe.web.server.tail import parse_line

MAX_SECONDS = 2.0
MIN_MATCH_SECONDS, MAX_MATCH_SECONDS = 0.02, 0.25
"""Least and most processor time for a pattern in one field: a line whose time is up is not searched again."""
PAGE_ROWS, PAGE_BYTES = 50, 8 << 20
"""A page ends after so many hits, or so many bytes of them."""
BLOCK_BYTES = 4 << 20
SNIPPET_CHARACTERS = 80
"""Characters shown on either side of what was found."""
MAX_QUERY_CHARACTERS = 1000
FIELDS = ("completion", "prompt", "failure", "answer", "turns")


@dataclass(frozen=True)
class Query:
    """What is looked for, and where."""

    text: str
    is_regex: bool = False
    kinds: tuple[str, ...] = KINDS
    pattern: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.text or len(self.text) > MAX_QUERY_CHARACTERS:
            raise DataError(f"q: write a text of 1 to {MAX_QUERY_CHARACTERS:,} characters")
        try:
            pattern = regex.compile(self.text if self.is_regex else regex.escape(self.text), regex.IGNORECASE)
        except (regex.error, RecursionError, OverflowError) as error:
            raise DataError(f"q: not a regular expression: {error}") from None
        object.__setattr__(self, "pattern", pattern)

    @property
    def needle(self) -> bytes | None:
        """The text as it stands in a file, in small letters; None for a regular expression."""
        if self.is_regex:
            return None
        return json.dumps(self.text, ensure_ascii=False)[1:-1].encode("utf-8", "backslashreplace").lower()


@dataclass(frozen=True)
class Cursor:
    """The next line to be searched."""

    step: int
    kind: str
    offset: int

    def __str__(self) -> str:
        return f"{self.step}.{self.kind}.{self.offset}"


def parse_cursor(text: str) -> Cursor:
    found = re.fullmatch(r"(\d{1,15})\.(train|eval)\.(\d{1,15})", text)
    if not found:
        raise DataError("cursor: write what the last page gave, or leave it out")
    return Cursor(int(found[1]), found[2], int(found[3]))


def search(
    run: Path,
    root: Path,
    query: Query,
    cursor: Cursor | None = None,
    stopped: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """A page: what was found, where to go on (None: everything was searched), and how much was and is left to be searched."""
    end = clock() + MAX_SECONDS
    files = _files(run, root, query.kinds, cursor)
    found: list[dict[str, Any]] = []
    searched, held, following = 0, 0, None
    for number, (step, kind, start) in enumerate(files):
        for offset, line, next_offset in _candidates(step_file(run, kind, step), start, query.needle):
            searched += next_offset - offset
            row = parse_line(line) if line else None
            hit = (
                _hit(row, query, lambda: min(MAX_MATCH_SECONDS, max(MIN_MATCH_SECONDS, end - clock())))
                if row is not None
                else None
            )
            if row is not None and hit is not None:
                found.append({**row, "step": step, "kind": kind, "offset": offset, "found": hit})
                held += len(line)
            if len(found) >= PAGE_ROWS or held >= PAGE_BYTES or clock() >= end or stopped():
                following = Cursor(step, kind, next_offset)
                break
        if following:
            files = files[number:]
            break
    else:
        files = []
    return {
        "rows": found,
        "cursor": str(following) if following else None,
        "searched_bytes": searched,
        "text": _words(searched, len(files)),
        "left_files": len(files),
    }


def _words(searched: int, left: int) -> str:
    done = f"searched {searched / 1e6:,.1f} MB"
    return f"{done}; {left:,} file{'s' * (left != 1)} to go" if left else f"{done}, which is all"


def _files(run: Path, root: Path, kinds: tuple[str, ...], cursor: Cursor | None) -> list[tuple[int, str, int]]:
    """(step, kind, offset to start at), newest first, training before evaluation; from the cursor on."""
    every = [(step, kind) for kind in kinds for step in recorded_steps(run, root, kind)]
    every.sort(key=lambda item: (-item[0], KINDS.index(item[1])))
    if cursor is None:
        return [(step, kind, 0) for step, kind in every]
    here = (-cursor.step, KINDS.index(cursor.kind))
    later = [item for item in every if (-item[0], KINDS.index(item[1])) >= here]
    return [(step, kind, cursor.offset if (step, kind) == (cursor.step, cursor.kind) else 0) for step, kind in later]


def _candidates(path: Path, start: int, needle: bytes | None) -> Iterator[tuple[int, bytes, int]]:
    """(offset, line, offset after it) of lines that may match, and an empty line for a stretch in which none does."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(start)
        offset = start
        while block := file.readlines(BLOCK_BYTES):
            data = b"".join(block)
            if needle is not None and needle not in data.lower():
                yield offset, b"", offset + len(data)
                offset += len(data)
                continue
            for line in block:
                matches = needle is None or needle in line.lower()
                yield offset, line if matches else b"", offset + len(line)
                offset += len(line)


def _hit(row: dict[str, Any], query: Query, seconds_left: Callable[[], float]) -> dict[str, Any] | None:
    """The first field that matches, with the text around it."""
    for name in FIELDS:
        text = _text(row.get(name))
        try:
            match = query.pattern.search(text, timeout=seconds_left(), concurrent=True) if text else None
        except TimeoutError:
            return {"field": name, "before": "", "match": "", "after": "", "note": "took too long to search"}
        if match:
            start, stop = match.span()
            stop = min(stop, start + 4 * SNIPPET_CHARACTERS)
            before, after = text[max(0, start - SNIPPET_CHARACTERS) : start], text[stop : stop + SNIPPET_CHARACTERS]
            return {"field": name, "before": before, "match": text[start:stop], "after": after}
    return None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "\n".join(filter(None, map(_text, value.values())))
    return "\n".join(filter(None, map(_text, value))) if isinstance(value, list) else ""
