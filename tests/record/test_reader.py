"""A run folder is read as it grows: only what was appended, and from the beginning where a resume replaced the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.base.errors import DataError
from trimtab.config.schema import Observe
from trimtab.record.columns import MetricTable
from trimtab.record.jsonl import JsonlTail
from trimtab.record.reader import RunReader, open_run
from trimtab.record.sinks import Sinks

PLAIN = Observe(tensorboard=False)


def line(step: int, value: float = 1.0) -> bytes:
    return json.dumps({"step": step, "time/total": 1.0, "x": value}).encode() + b"\n"


def read(reader: RunReader) -> list[tuple[int, float]]:
    steps, values = reader.metrics.points("x")
    return list(zip(steps.tolist(), values.tolist(), strict=True))


def test_a_live_run_is_read_line_by_line_as_it_grows(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    assert reader.update() is None and len(reader.metrics) == 0
    sinks = Sinks(tmp_path, PLAIN, None)
    assert reader.update() is None
    for step in (1, 2, 3):
        sinks.write(step, {"x": step / 2, "time/total": 1.0})
        assert reader.update() == step - 1
        assert reader.update() is None
    sinks.write(3, {"eval/pass@1": 0.5})
    assert reader.update() == 2, "a line of the same step changes its row"
    sinks.close()
    assert read(reader) == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert reader.offset == (tmp_path / "metrics.jsonl").stat().st_size


def test_only_what_was_appended_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(line, range(1000))))
    tail = JsonlTail(path)
    assert len(tail.read()[1]) == 1000
    with path.open("ab") as file:
        file.write(line(1000))
    parsed: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr("trimtab.record.jsonl.json.loads", lambda text: parsed.append(text) or loads(text))
    assert tail.read() == (False, [{"step": 1000, "time/total": 1.0, "x": 1.0}])
    assert parsed == [line(1000).strip()]


@given(st.lists(st.integers(0, 400), max_size=6))
def test_wherever_a_write_is_seen_half_done_all_rows_arrive_once(tmp_path_factory, cuts: list[int]) -> None:
    data = b"".join(line(step, step / 4) for step in range(1, 8))
    folder = tmp_path_factory.mktemp("run")
    reader = RunReader(folder)
    with (folder / "metrics.jsonl").open("wb", buffering=0) as file:
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)]):
            file.write(data[start:end])
            reader.update()
            whole = data[: min(end, len(data)) + 1].count(b"\n")  # a line that lacks its newline only is whole
            assert len(reader.metrics) == whole
    assert read(reader) == [(step, step / 4) for step in range(1, 8)]
    assert not reader.damaged


def test_a_resumed_run_is_read_from_the_beginning(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    sinks = Sinks(tmp_path, PLAIN, None)
    for step in (1, 2, 3, 4):
        sinks.write(step, {"x": 1.0})
    reader.update()
    sinks.close()
    sinks = Sinks(tmp_path, PLAIN, 2)
    for step in (3, 4, 5):
        sinks.write(step, {"x": 2.0})
    assert reader.update() == 0
    assert read(reader) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    sinks.close()


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_file_written_over_in_place_is_noticed(tmp_path: Path, steps: int) -> None:
    """Shorter, as long, or longer than what was read: the inode stays the same."""
    path, reader = tmp_path / "metrics.jsonl", RunReader(tmp_path)
    path.write_bytes(b"".join(line(step) for step in (1, 2, 3)))
    reader.update()
    path.write_bytes(b"".join(line(step, 2.0) for step in range(1, steps + 1)))
    assert reader.update() == 0
    assert read(reader) == [(step, 2.0) for step in range(1, steps + 1)]


def test_a_file_that_was_removed_has_no_rows(tmp_path: Path) -> None:
    path, reader = tmp_path / "metrics.jsonl", RunReader(tmp_path)
    path.write_bytes(line(1))
    reader.update()
    path.unlink()
    assert reader.update() == 0 and len(reader.metrics) == 0
    assert reader.update() is None


def test_lines_that_cannot_be_read_are_named_and_the_rest_is_there(tmp_path: Path) -> None:
    broken = [b'{"step": 2, "x"\n', b"[1]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"]
    (tmp_path / "metrics.jsonl").write_bytes(line(1) + b"".join(broken) + line(6) + b'{"step": 7, "x')
    reader = RunReader(tmp_path)
    assert reader.update() == 0
    assert read(reader) == [(1, 1.0), (6, 1.0)]
    assert [found.line for found in reader.damaged] == [2, 3, 4, 5]
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: not JSON .* Remove the line"):
        reader.refuse_damaged()


def test_line_numbers_go_on_over_several_reads(tmp_path: Path) -> None:
    path, reader = tmp_path / "metrics.jsonl", RunReader(tmp_path)
    path.write_bytes(line(1) + line(2).strip())
    reader.update()
    with path.open("ab") as file:
        file.write(b"\n\n{\n")
    reader.update()
    assert [found.line for found in reader.damaged] == [4]
    assert len(reader.metrics) == 2


def test_samples_and_settings(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("learn: {steps: 9}")
    (tmp_path / "samples").mkdir()
    (tmp_path / "eval" / "samples").mkdir(parents=True)
    (tmp_path / "samples" / "step-3.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "eval" / "samples" / "step-0.jsonl").write_text('{"prompt": "b"}\n')
    reader = open_run(tmp_path)
    assert reader.settings() == {"learn": {"steps": 9}}
    assert reader.samples(3) == [{"prompt": "a"}] and reader.samples(4) == []
    assert reader.eval_samples(0) == [{"prompt": "b"}]
    assert isinstance(reader.metrics, MetricTable) and not reader.finished and reader.checkpoint_steps == []


def test_no_torch_is_needed() -> None:
    code = "import sys, trimtab.record.reader; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
