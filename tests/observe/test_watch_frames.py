"""Frames of `trimtab watch`: as recorded, within their size whatever the run, and without a character that a terminal obeys.

To record them anew, look at them: TRIMTAB_RECORD=1 pytest tests/observe/test_watch_frames.py
"""

from __future__ import annotations

import json
import os
import shutil
import time
import unicodedata
from pathlib import Path

import pytest
from rich.text import Text

from tests.observe import watched
from tests.observe.planted import DISTINCT, plant
from trimtab.observe.format import MISSING
from trimtab.observe.watch.fit import Lines, ScreenPart, beside, column, share_lines, wrap
from trimtab.observe.watch.overview import column_widths, overview
from trimtab.observe.watch.pages import footer, help_lines, log_lines, sample_lines
from trimtab.observe.watch.runs import RunsSource, runs_lines
from trimtab.observe.watch.source import RunSource
from trimtab.observe.watch.view import RunView

RECORDED = Path(__file__).parent / "recorded"
SIZES = ((60, 40), (80, 24), (120, 36), (200, 50))
OTHER_SIZES = ((20, 6), (40, 12), (79, 100), (160, 20), (300, 90))
SAMPLE = {
    "prompt": "What is 6 times 7?",
    "completion": "Let me think.\n\n6 × 7 = 42\n#### 42",
    "reward": 1.0,
    "rewards": {"math": 1.0, "short": 0.25},
    "advantage": 0.5,
    "tokens": 17,
    "finish": "stop",
    "chosen": "best",
    "answer": "42",
}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def compare(name: str, lines: Lines) -> None:
    path = RECORDED / f"{name}.txt"
    text = "".join(f"{line.plain.rstrip()}\n" for line in lines)
    if os.environ.get("TRIMTAB_RECORD"):
        path.write_text(text)
    assert text == path.read_text()


def check(lines: Lines, width: int, height: int) -> None:
    assert len(lines) <= height
    for line in lines:
        assert line.cell_len <= width, line.plain
        obeyed = [c for c in line.plain if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
        assert not obeyed, (line.plain, obeyed)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_overview_is_as_recorded(width: int, height: int) -> None:
    lines = overview(watched.view(), width, height)
    check(lines, width, height)
    compare(f"overview-{width}", lines)


def test_the_other_pages_are_as_recorded() -> None:
    compare("help-80", [*help_lines(80, 23), footer(4, 80)])
    compare("log-80", [*log_lines(watched.view(), 0, 80, 23), footer(3, 80)])
    compare("samples-80", [*sample_lines([1, 10, 20], 10, [SAMPLE, SAMPLE], 1, 0, 80, 23), footer(2, 80)])


@pytest.mark.parametrize("name", DISTINCT)
def test_every_run_fits_every_size(name: str, tmp_path: Path) -> None:
    source = RunSource(plant(tmp_path / "run", name))
    steps = source.sample_steps()
    rows = source.samples(steps[-1]) if steps else []
    for width, height in (*SIZES, *OTHER_SIZES):
        check(overview(source.view, width, height), width, height)
        check(log_lines(source.view, 0, width, height), width, height)
        for at in range(min(3, len(rows))):
            check(sample_lines(steps, steps[-1], rows, at, 0, width, height), width, height)
    told = " ".join(line.plain for line in overview(source.view, 200, 60))
    found = {
        "failed": "✗ failed",
        "quiet": "▲ quiet",
        "starting": "○ starting",
        "rollout_tail": "waits for its longest",
    }
    assert found.get(name, "✓") in told
    if name == "damaged":
        assert "metrics.jsonl, line" in told


def test_a_folder_with_nothing_but_a_config_opens(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("learn: {steps: 5}\n")
    check(overview(RunSource(tmp_path).view, 80, 24), 80, 24)
    check(overview(RunView(), 80, 24), 80, 24)


def test_widths_choose_the_columns() -> None:
    assert [len(column_widths(width)) for width in (20, 60, 80, 119, 120, 159, 160, 300)] == [1, 1, 1, 1, 2, 2, 3, 3]
    assert all(sum(column_widths(width)) + 2 * (len(column_widths(width)) - 1) == width for width in range(20, 300))


def part(title: str, least: int, most: int, rank: int) -> ScreenPart:
    return ScreenPart(title, lambda width, height: [Text(title * width)] * 99, least, most, rank)


def test_lines_are_shared_by_rank() -> None:
    parts = [part("a", 2, 9, 1), part("b", 2, 2, 3), part("c", 2, 9, 2), part("d", 0, 0, 1)]
    assert [(each.title, lines) for each, lines in share_lines(parts, 100)] == [("a", 9), ("b", 2), ("c", 9)]
    assert [(each.title, lines) for each, lines in share_lines(parts, 12)] == [("a", 4), ("b", 2), ("c", 3)]
    assert [(each.title, lines) for each, lines in share_lines(parts, 7)] == [("a", 3), ("c", 2)]
    assert share_lines(parts, 0) == []
    check(column(parts, 7, 5), 7, 5)


def test_words_are_wrapped_and_cut() -> None:
    assert [line.plain for line in wrap("aa bb cc", 5, 9)] == ["aa bb", "cc"]
    assert [line.plain for line in wrap("aa bb cc dd ee", 5, 2)] == ["aa bb", "cc d…"]
    assert [line.plain for line in wrap("a" * 12, 5, 9)] == ["aaaaa", "aaaaa", "aa"]
    joined = beside([[Text("aaaa")], [Text("b"), Text("c")]], [3, 3], 1)
    assert [line.plain for line in joined] == ["aa… b", "    c"]


def test_a_long_sample_is_scrolled_and_a_strange_one_is_shown() -> None:
    long = {**SAMPLE, "completion": "\n".join(map(str, range(100)))}
    top = sample_lines([1], 1, [long], 0, 0, 80, 20)
    assert top[-1].plain.startswith("… ") and top[-1].plain.endswith(" more lines")
    end = sample_lines([1], 1, [long], 0, 10_000, 80, 20)
    assert end[-1].plain == "99"
    odd = {"prompt": None, "completion": ["a", {"b": 1}], "reward": "nan", "rewards": "x", "tokens": "many"}
    check(sample_lines([1], 1, [odd], 0, 0, 60, 20), 60, 20)
    huge = {**SAMPLE, "completion": "x" * 2_000_000}
    check(sample_lines([1], 1, [huge], 0, 0, 60, 20), 60, 20)
    assert "No samples yet" in sample_lines([], None, [], 0, 0, 80, 20)[0].plain


def test_findings_of_a_run_that_goes_on_are_counted_again_now_and_then(tmp_path: Path) -> None:
    run, now = plant(tmp_path / "runs" / "run", "rollout_tail"), [time.time()]
    source = RunsSource(tmp_path / "runs", lambda: now[0])
    (row,) = source.rows
    assert row["facts"]["findings"].startswith("▲ ") and "▲ 0" not in row["facts"]["findings"]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    short = tmp_path / "runs" / "short"
    shutil.copytree(run, short)
    (short / "run.json").write_text(json.dumps({"state": "running", "steps": 150}))
    (short / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    shutil.rmtree(short / "final", ignore_errors=True)
    assert source.refresh()
    judged = {row["name"]: row["facts"]["findings"] for row in source.rows}
    assert judged["short"] == MISSING, "too few steps to judge"
    (short / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (short / "now.json").write_text(json.dumps({"at": now[0], "step": last["step"], "steps": 150, "phase": "update"}))
    now[0] += 1
    assert source.refresh()
    assert {row["name"]: row["facts"]["findings"] for row in source.rows}["short"] == MISSING
    (short / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(last | {"step": last["step"] + 1})]) + "\n")
    now[0] += 10
    assert source.refresh()
    found = {row["name"]: row["facts"]["findings"] for row in source.rows}
    assert found["short"] == found["run"] == row["facts"]["findings"]


def test_runs_are_a_table_with_the_newest_at_the_top(tmp_path: Path) -> None:
    for name in ("healthy", "failed", "hostile"):
        plant(tmp_path / "runs" / name, name)
    plant(tmp_path / "runs" / "deep" / "er" / "sft", "sft")
    os.utime(tmp_path / "runs/failed/metrics.jsonl", (time.time() + 100,) * 2)
    source = RunsSource(tmp_path / "runs")
    for width, height in (*SIZES, *OTHER_SIZES):
        check(runs_lines(source.rows, time.time(), width, height), width, height)
    lines = [line.plain for line in runs_lines(source.rows, time.time(), 120, 20)]
    assert lines[0].split() == [
        "run",
        "state",
        "step",
        "learns",
        "held",
        "out",
        "findings",
        "s",
        "a",
        "step",
        "peak",
        "last",
        "sign",
    ]
    assert lines[1].startswith("failed") and "✗ failed" in lines[1] and "87/150" in lines[1] and "73.5%" in lines[1]
    assert any(line.startswith("deep/er/sft") for line in lines) and len(lines) == 5  # checkpoints are no runs
    assert next(line for line in lines if line.startswith("deep/er/sft")).split().count("none") == 1
    assert not source.refresh()
    plant(tmp_path / "runs" / "new", "one_step")
    assert source.refresh() and len(source.rows) == 5
    assert "and 2 more" in runs_lines(source.rows, time.time(), 80, 5)[-1].plain
