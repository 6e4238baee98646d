"""A run folder is read whatever became of the run: torn, resumed, unfinished, newer, or no run at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trimtab.base.errors import DataError
from trimtab.observe.doctor.record import Record, read_record
from trimtab.observe.doctor.trend import kendall_z, stretches, trend
from trimtab.record.columns import MetricTable


def write(folder: Path, lines: list[str], config: str = "learn: {steps: 9}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def step(number: int, **values: object) -> str:
    return json.dumps({"step": number, "time/total": 1.0} | values)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = read_record(write(tmp_path, [step(1), step(2), '{"step": 3, "time/to']))
    assert run.steps == [1, 2]


def test_evaluation_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    run = read_record(write(tmp_path, ['{"step": 0, "eval/pass@1": 0.25}', step(1)]))
    assert run.steps == [1]
    assert run.points("eval/pass@1") == [(0, 0.25)]


def test_values_that_are_no_numbers_are_not_there(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "a": NaN, "b": Infinity, "c": null, "d": "text", "e": [1], "f": true, "g": 2}',
        '{"x": 1}',
    ]
    run = read_record(write(tmp_path, lines))
    assert [run.values(name) for name in "abcdefg"] == [[], [], [], [], [], [], [2.0]]


def test_no_metrics_yet_is_a_run_of_no_steps(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("learn: {steps: 9}")
    assert read_record(tmp_path).steps == []


def test_what_the_folder_says_about_the_end(tmp_path: Path) -> None:
    write(tmp_path, [step(1)])
    for name in ("step-9", "step-10", ".writing-step-11", "step-x"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    run = read_record(tmp_path, clock=lambda: (tmp_path / "metrics.jsonl").stat().st_mtime + 90)
    assert (run.finished, run.checkpoint, round(run.quiet_s)) == (False, "step-10", 90)
    (tmp_path / "final").mkdir()
    assert read_record(tmp_path).finished


def test_settings_of_a_newer_version_do_not_matter(tmp_path: Path) -> None:
    config = {"learn": {"steps": 9, "updates_per_step": "auto", "new": 1}, "run": {"device": 3}, "other": [1]}
    run = read_record(write(tmp_path, [], yaml.safe_dump(config)))
    assert run.setting("learn.steps", 0) == 9
    assert run.updates_per_batch == 1 and not run.on_cuda
    assert run.setting("learn.steps.deeper", 5) == 5


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "does not exist"),
        (lambda folder: folder.write_text("x"), "is a file, not a folder"),
        (lambda folder: folder.mkdir(), "holds no run: it has no config.yaml, which every run writes first"),
        (lambda folder: write(folder, [], "a: [1"), "line 1, column 6: YAML cannot be read: expected"),
        (lambda folder: write(folder, [], "just text"), "holds no settings"),
        (lambda folder: write(folder, ["{", step(1)]), "metrics.jsonl, line 1: not JSON"),
        (lambda folder: write(folder, ["[1]", step(1)]), "metrics.jsonl, line 1: not a JSON object"),
        (lambda folder: write(folder, ["[" * 100_000, step(1)]), "metrics.jsonl, line 1: the JSON is nested"),
        (lambda folder: write(folder, [], "a: " + "[" * 5000), "cannot be read as YAML"),
    ],
)
def test_what_is_no_run_is_named(tmp_path: Path, prepare, message: str) -> None:
    prepare(tmp_path / "it")
    with pytest.raises(DataError, match=message):
        read_record(tmp_path / "it")


def test_the_folder_of_all_runs_leads_to_the_newest(tmp_path: Path) -> None:
    for name in ("a-20260101-000000", "a-20260102-000000"):
        write(tmp_path / name, [])
    with pytest.raises(DataError, match=r"Did you mean .*a-20260102-000000"):
        read_record(tmp_path)


def test_shares_of_time_leave_out_the_first_step() -> None:
    rows = [{"step": 1, "time/a": 90.0, "time/total": 100.0}, {"step": 2, "time/a": 1.0, "time/total": 4.0}]
    assert Record({}, MetricTable(rows)).share_of_time("a") == 0.25
    assert Record({}, MetricTable(rows[:1])).share_of_time("a") == 0.9
    assert Record({}, MetricTable()).share_of_time("a") is None


def test_trend_by_hand() -> None:
    line = trend([float(n) for n in range(24)])
    assert (line.start, line.end, line.sure) == (0.0, 23.0, True)
    assert line.rises(22.0) and not line.rises(23.0) and not line.falls()
    assert not trend([1.0] * 50).sure
    assert not trend([float(n) for n in range(19)]).sure, "too short"
    assert stretches([1, 9, 2, 2, 5, 5], 3) == [5, 2, 5]
    assert kendall_z([1, 2, 3, 4]) == pytest.approx(5 / (4 * 3 * 13 / 18) ** 0.5)


def test_one_wild_value_makes_no_trend_and_hides_none() -> None:
    flat = [1.0, 1.1] * 30
    flat[-1] = 1e9
    assert not trend(flat).sure
    rising = [n + (n % 3) for n in range(60)]
    rising[5] = -1e9
    assert trend([float(value) for value in rising]).rises(50)


@given(st.lists(st.floats(-1e6, 1e6), min_size=20, max_size=60), st.floats(1, 100), st.floats(-1e3, 1e3))
def test_a_trend_follows_its_unit(values: list[float], scale: float, shift: float) -> None:
    line = trend(values)
    assert trend([-value for value in values]).change == pytest.approx(-line.change, rel=1e-6, abs=1e-3)
    assert trend([scale * v + shift for v in values]).change == pytest.approx(scale * line.change, rel=1e-5, abs=1e-2)
