"""Rows from a JSONL, JSON, CSV or Parquet file.

Every row is a dict. What cannot be read is a DataError that names the file, the line, and what is wrong with it;
nothing is skipped but blank lines. Text is UTF-8, with or without a byte order mark.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError

Row = dict[str, Any]

_BOM = b"\xef\xbb\xbf"

TOO_DEEP = "lists or objects are nested thousands of levels deep."
MAX_FINGERPRINTED_ROWS = 1000
MAX_FIELD_CHARACTERS = 2**31 - 1
"""Characters of one value in a CSV file."""


def fingerprint(rows: Sequence[Mapping[str, Any]]) -> str:
    """What tells these rows from others in another order: how many there are, and a hash of a thousand evenly among them."""
    chosen = range(0, len(rows), -(-len(rows) // MAX_FINGERPRINTED_ROWS) or 1)
    text = json.dumps([rows[i] for i in chosen], default=lambda value: type(value).__name__, skipkeys=True)
    return f"{len(rows)} rows, {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def read_rows(path: Path, limit: int | None = None) -> list[Row]:
    """The file's first `limit` rows (None: all of them), at least one."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} has no known file type. Use one of {', '.join(READERS)}.")
    if not path.is_file():  # a pipe that nobody writes to would be waited for without end
        raise DataError(f"{path} is a pipe or a device, not a file. Write the rows to a file and name that file.")
    try:
        rows = list(islice(reader(path), limit))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    if not rows:
        state = "is empty" if path.stat().st_size == 0 else "holds no rows"
        raise DataError(f"{path} {state}. A data set needs at least one row.")
    return rows


def read_jsonl(path: Path) -> Iterator[Row]:
    """One JSON object a line; blank lines are skipped."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {number}: not valid JSON: {error.msg} (column {error.colno}). "
                f"The line begins: {_beginning(line)}"
            ) from error
        except ValueError as error:  # a number of thousands of digits
            raise DataError(f"{path}, line {number}: {error}. The line begins: {_beginning(line)}") from error
        except RecursionError as error:
            raise DataError(f"{path}, line {number}: {TOO_DEEP} The line begins: {_beginning(line)}") from error
        yield _row(row, f"{path}, line {number}")


def read_json(path: Path) -> Iterator[Row]:
    """One list of objects."""
    text = "".join(line for _, line in _lines(path))
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        hint = " One object a line is JSON Lines: name the file .jsonl." if error.msg == "Extra data" else ""
        line = text.split("\n")[error.lineno - 1]
        raise DataError(
            f"{path}, line {error.lineno}: not valid JSON: {error.msg} (column {error.colno}).{hint} "
            f"The line begins: {_beginning(line)}"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: {error}.") from error
    except RecursionError as error:
        raise DataError(f"{path}: {TOO_DEEP}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds one {_kind(rows)}, but must hold a list of objects: [{{...}}, {{...}}].")
    for number, row in enumerate(rows, 1):
        yield _row(row, f"{path}, row {number}")


def read_csv(path: Path) -> Iterator[Row]:
    """Comma-separated values under a header line; every value is a string."""
    csv.field_size_limit(MAX_FIELD_CHARACTERS)  # Python's own is 131,072 characters, less than a long prompt has
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        header = next((fields for fields in reader if fields), None)
        if header is None:
            return
        _check_header(f"{path}, line {reader.line_num}: the header", header)
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields, but the header has {len(header)} "
                    f"({', '.join(header)}). Put fields that hold commas or line breaks in double quotes."
                )
            yield dict(zip(header, fields))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}.") from error


def read_parquet(path: Path) -> Iterator[Row]:
    """A Parquet table, read in batches."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"Reading {path} needs pyarrow: pip install 'trimtab[data]'.") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _check_header(f"{path}: the table", table.schema_arrow.names)
            for batch in table.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a time beyond the year 9999
        raise DataError(f"{path} holds a value that Python cannot represent: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
"""File name ending -> reader."""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, split at line feeds only: JSON strings may hold the other Unicode line separators."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removeprefix(_BOM) if number == 1 else raw
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not UTF-8 text: byte 0x{line[error.start]:02x} at byte {error.start + 1} "
                    f"of the line. Save the file as UTF-8."
                ) from error


def _row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f'{where}: a row must be an object such as {{"prompt": ...}}, but this is a {_kind(row)}.')
    return row


def _check_header(what: str, names: list[str]) -> None:
    if "" in names:
        raise DataError(f"{what} gives no name to column {names.index('') + 1}.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{what} names {', '.join(map(repr, twice))} more than once.")


def _beginning(line: str, width: int = 80) -> str:
    line = line.strip()
    return line if len(line) <= width else line[:width] + "..."


def _kind(value: Any) -> str:
    """A JSON value's type in JSON's words."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
