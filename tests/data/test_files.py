"""Files become rows, and a file that cannot is an error that says where."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pytest

from trimtab.base.errors import DataError
from trimtab.data.files import READERS, fingerprint, read_rows

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'say "hi",\nplease é你\u2028', "answer": ""}]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(path: Path) -> str:
    with pytest.raises(DataError) as error:
        read_rows(path)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_jsonl_round_trip(tmp_path: Path, ensure_ascii: bool) -> None:
    text = "\n".join(json.dumps(row, ensure_ascii=ensure_ascii) for row in ROWS)
    assert read_rows(write(tmp_path / "a.jsonl", text)) == ROWS


def test_json_round_trip(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path / "a.json", json.dumps(ROWS, indent=1))) == ROWS


def test_csv_round_trip(tmp_path: Path) -> None:
    text = 'prompt,answer\r\n1+1=,2\r\n"say ""hi"",\nplease é你\u2028",\r\n\r\n'
    assert read_rows(write(tmp_path / "a.csv", text)) == ROWS


def test_parquet_round_trip(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [{**row, "messages": [{"role": "user", "content": "x"}], "n": i} for i, row in enumerate(ROWS)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == rows
    assert read_rows(tmp_path / "a.parquet", limit=1) == rows[:1]


def test_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    text = "\n".join([*(json.dumps(row) for row in ROWS), "broken"])
    assert read_rows(write(tmp_path / "a.jsonl", text), limit=2) == ROWS


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    assert read_rows(write(tmp_path / "a.jsonl", '\n{"a": 1}\n\n  \r\n{"a": 2}\n\n')) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", '{"a": "1"}\n'), ("a.json", '[{"a": "1"}]'), ("a.csv", "a\n1\n")]
)
def test_byte_order_mark_is_tolerated(tmp_path: Path, name: str, text: str) -> None:
    assert read_rows(write(tmp_path / name, b"\xef\xbb\xbf" + text.encode())) == [{"a": "1"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_empty_file(tmp_path: Path, name: str) -> None:
    assert "is empty" in refused(write(tmp_path / name, ""))


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "prompt,answer\n")])
def test_file_without_rows(tmp_path: Path, name: str, text: str) -> None:
    assert "holds no rows" in refused(write(tmp_path / name, text))


def test_broken_json_on_line_7(tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}'] * 6 + ['{"prompt": "b" "answer": "%s"}' % ("x" * 200)] + ['{"prompt": "c"}']
    message = refused(write(tmp_path / "a.jsonl", "\n".join(lines)))
    assert "line 7: not valid JSON: Expecting ',' delimiter (column 16)" in message
    assert 'begins: {"prompt": "b" "answer"' in message
    assert "x" * 100 not in message


def test_broken_json_list_names_the_line(tmp_path: Path) -> None:
    assert "line 3: not valid JSON" in refused(write(tmp_path / "a.json", '[\n{"a": 1},\n{"a": }\n]'))


def test_json_lines_in_a_json_file_are_told_apart(tmp_path: Path) -> None:
    assert "name the file .jsonl" in refused(write(tmp_path / "a.json", '{"a": 1}\n{"a": 2}\n'))


def test_rows_must_be_objects(tmp_path: Path) -> None:
    assert "line 2: a row must be an object" in refused(write(tmp_path / "a.jsonl", '{"a": 1}\n[1]\n'))
    assert "row 2: a row must be an object" in refused(write(tmp_path / "a.json", '[{"a": 1}, "b"]'))
    assert "holds one object" in refused(write(tmp_path / "b.json", '{"a": 1}'))


def test_csv_row_with_other_number_of_fields(tmp_path: Path) -> None:
    message = refused(write(tmp_path / "a.csv", "prompt,answer\n1+1=,2\nhello, world,3\n"))
    assert "line 3: 3 fields, but the header has 2 (prompt, answer)" in message


def test_csv_quote_that_never_ends(tmp_path: Path) -> None:
    assert "not valid CSV" in refused(write(tmp_path / "a.csv", 'prompt,answer\n"abc,2\n'))


def test_csv_header_must_name_each_column_once(tmp_path: Path) -> None:
    assert "'a' more than once" in refused(write(tmp_path / "a.csv", "a,b,a\n1,2,3\n"))
    assert "line 1: the header gives no name to column 2" in refused(write(tmp_path / "b.csv", "a,,c\n1,2,3\n"))


def test_a_csv_value_may_be_long_and_blank_lines_come_before_the_header(tmp_path: Path) -> None:
    long = "a" * 200_000
    path = write(tmp_path / "a.csv", f'\n\nprompt,answer\n"{long}",2\n')
    assert read_rows(path) == [{"prompt": long, "answer": "2"}]


def test_parquet_tables_that_make_no_rows_are_told(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    assert "the table names 'prompt' more than once" in refused(path)
    pq.write_table(pa.table({"prompt": pa.array([b"caf\xe9"]).view(pa.string())}), path)
    assert "a value that Python cannot represent: 'utf-8' codec" in refused(path)
    pq.write_table(pa.table({"prompt": ["a"], "when": pa.array([2**60], type=pa.timestamp("ms"))}), path)
    assert "a value that Python cannot represent" in refused(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_bad_encoding(tmp_path: Path, name: str) -> None:
    message = refused(write(tmp_path / name, b'{"a": 1}\n{"a": "caf\xe9"}\n'))
    assert "line 2: not UTF-8 text: byte 0xe9 at byte 11" in message


def test_parquet_that_is_not_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    assert "not a readable Parquet file" in refused(write(tmp_path / "a.parquet", "prompt,answer"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "pyarrow")
    assert "trimtab[data]" in refused(write(tmp_path / "a.parquet", "x"))


def test_unknown_file_type(tmp_path: Path) -> None:
    assert ".jsonl" in refused(write(tmp_path / "a.txt", "x"))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "a.jsonl", "{}")
    monkeypatch.setattr(Path, "open", deny)
    assert "cannot be read: Permission denied" in refused(path)


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if the package were not installed."""
    real = builtins.__import__

    def fake(name: str, *rest: Any, **keys: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **keys)

    monkeypatch.setattr(builtins, "__import__", fake)


@pytest.mark.parametrize(
    ("value", "words"), [("9" * 5000, "4300 digits"), ("[" * 100_000 + "]" * 100_000, "levels deep")]
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_numbers_and_lists_beyond_what_is_read_are_told(tmp_path: Path, value: str, words: str, suffix: str) -> None:
    text = f'{{"prompt": {value}}}'
    (tmp_path / f"rows.{suffix}").write_text(text if suffix == "jsonl" else f"[{text}]")
    with pytest.raises(DataError, match=words):
        read_rows(tmp_path / f"rows.{suffix}")


def test_a_mark_tells_rows_from_others_and_from_another_order() -> None:
    rows = [{"prompt": str(n), "tags": {n}} for n in range(2500)]
    assert fingerprint(rows) == fingerprint([dict(row) for row in rows]) and fingerprint(rows).startswith("2500 rows, ")
    assert len({fingerprint(rows), fingerprint(rows[:-1]), fingerprint(rows[::-1]), fingerprint(rows[:10])}) == 4


@pytest.mark.parametrize("suffix", READERS)
def test_a_pipe_is_no_file(tmp_path: Path, suffix: str) -> None:
    """Nobody writes to it: reading would wait without end."""
    os.mkfifo(tmp_path / f"rows{suffix}")
    assert "is a pipe or a device, not a file" in refused(tmp_path / f"rows{suffix}")
