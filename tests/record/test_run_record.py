"""What a run says of itself: written whole, kept over resumes, and never in its way."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from trimtab.config.load import config_from_dict
from trimtab.record import events as events_module
from trimtab.record.distributions import distributions, length_edges, value_edges
from trimtab.record.events import EventLog
from trimtab.record.reader import RunReader
from trimtab.record.record_writer import RecordWriter
from trimtab.record.run_file import RunFile, commands, git_commit, keys_set
from trimtab.record.step_lines import StepLines


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_events_from_before_the_folder_come_first_and_all_stay(tmp_path: Path) -> None:
    for start in (1, 2):
        log = EventLog(clock=lambda start=start: float(start))
        log.add("warn", "warning", "early")
        log.open(tmp_path)
        log.step = 4
        log.add("info", "note", "later", {"x": 1})
        log.add("info", "checkpoint", "of another step", step=3)
        log.close()
    found = RunReader(tmp_path).events()
    assert [(e["at"], e["step"], e["text"]) for e in found[:3]] == [
        (1.0, None, "early"),
        (1.0, 4, "later"),
        (1.0, 3, "of another step"),
    ]
    assert len(found) == 6 and found[1] == {
        "at": 1.0, "step": 4, "level": "info", "kind": "note", "text": "later", "data": {"x": 1},
    }  # fmt: skip


@pytest.mark.parametrize("torn", ['{"at": 1.0, "te', "x" * 9000])
def test_a_torn_event_is_read_around_and_cut_off_by_the_next_start(tmp_path: Path, torn: str) -> None:
    log = EventLog()
    log.open(tmp_path)
    log.add("info", "note", "whole")
    log.close()
    path = tmp_path / "events.jsonl"
    path.write_text(path.read_text() + torn)
    assert [event["text"] for event in RunReader(tmp_path).events()] == ["whole"]
    log = EventLog()
    log.open(tmp_path)
    log.add("info", "note", "next")
    log.close()
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["whole", "next"]


def test_an_event_never_fails_whoever_reports_it_and_surfaces_when_it_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog()
    log.open(tmp_path)
    append = events_module.append_whole
    monkeypatch.setattr(events_module, "append_whole", full_disk)
    log.add("info", "note", "kept")
    with pytest.raises(OSError, match="No space left"):
        log.settle()
    monkeypatch.setattr(events_module, "append_whole", append)
    log.add("info", "note", "after")
    log.settle()
    log.close()
    assert [event["text"] for event in RunReader(tmp_path).events()] == ["kept", "after"]


def test_starts_are_counted_and_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        run = RunFile(tmp_path, resumed=number > 1)
        assert run.start == number
        run.begin(100.0 * number, 5 * number, {"command": "trimtab train a.yaml", "set": ["learn.lr"]})
        assert run.start == number
        assert RunReader(tmp_path).run()["state"] == "starting"
    run.change(state="failed", error={"type": "E", "text": "x"})
    found = RunReader(tmp_path).run()
    assert (found["version"], found["state"], found["error"]["type"]) == (1, "failed", "E")
    assert [(s["number"], s["at"], s["step"]) for s in found["starts"]] == [(1, 100.0, 5), (2, 200.0, 10)]


def test_a_run_of_a_version_that_did_not_count_is_at_its_second_start(tmp_path: Path) -> None:
    assert RunFile(tmp_path, resumed=True).start == 2
    (tmp_path / "run.json").write_text("{")
    assert RunFile(tmp_path, resumed=False).start == 1


def test_the_command_and_what_resumes_it() -> None:
    found = commands("`trimtab train 'a b.yaml' learn.lr=1e-6 --resume`")
    assert found["command"] == "trimtab train 'a b.yaml' learn.lr=1e-6"
    assert found["resume"] == "trimtab train 'a b.yaml' learn.lr=1e-6 --resume"
    assert commands("the same call and resume=True") == {"command": None, "resume": "the same call and resume=True"}


def test_keys_that_the_user_set() -> None:
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": "task:arithmetic"},
        "reward": [{"fn": "a.py:f", "weight": 2}],
        "learn": {"sampling": {"temperature": 0.7}},
    }
    found = keys_set(config_from_dict(tree, ["observe.samples_rows=8"]))
    assert found == [
        "model.path", "data.train", "reward.0.fn", "reward.0.weight", "learn.sampling.temperature", "observe.samples_rows",
    ]  # fmt: skip


def test_the_commit_is_read_without_git(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None or len(git_commit(tmp_path) or "") == 40
    git = tmp_path / "repo/.git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{'b' * 40} refs/heads/main\n")
    assert git_commit(tmp_path / "repo") == "b" * 40
    (git / "refs/heads/main").write_text("a" * 40 + "\n")
    (tmp_path / "repo/deep/er").mkdir(parents=True)
    assert git_commit(tmp_path / "repo/deep/er") == "a" * 40
    (git / "HEAD").write_text("c" * 40)
    assert git_commit(tmp_path / "repo") == "c" * 40


def test_lines_of_steps_to_come_are_gone_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "deep/lines.jsonl"
    lines = StepLines(path, None)
    for step in (1, 2, 3):
        lines.write({"step": step})
    lines.close()
    path.write_text(path.read_text() + 'damaged\n{"step": "x"}\n{"st')
    lines = StepLines(path, 2)
    lines.write({"step": 3, "again": True})
    lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "again": True},
    ]


ROW = {"reward": 1.0, "finish": "stop", "failure": None}


def test_samples_are_written_behind_and_indexed(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, None)
    writer.samples("train", 1, [ROW])
    writer.samples("eval", 1, [ROW, ROW])
    writer.results(1, [{"prompt_id": 3, "right": True}])
    writer.distributions({"step": 1})
    writer.close()
    reader = RunReader(tmp_path)
    assert [(line["kind"], line["step"], line["rows"]) for line in reader.sample_index()] == [
        ("train", 1, 1),
        ("eval", 1, 2),
    ]
    assert reader.eval_results(1) == [{"prompt_id": 3, "right": True}]
    assert reader.distributions() == [{"step": 1}]
    assert not [thread for thread in threading.enumerate() if thread.name == "trimtab-record"]


def test_what_keeps_samples_from_the_disk_is_raised_once_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RecordWriter(tmp_path, None)
    monkeypatch.setattr("trimtab.record.samples.write_file", full_disk)
    writer.samples("train", 1, [ROW])
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    writer.raise_if_failed()
    writer.close()
    assert RunReader(tmp_path).sample_index() == []


def test_every_value_is_counted_and_edges_seldom_change() -> None:
    found = distributions(3, [1, 5, 64, 99], 64, [0.0, 1.0, 0.5, float("nan")], [-1.5, 0.2], [0, 2, 4, 4], 4)
    assert found["step"] == 3
    for name, bins, count in (("lengths", 64, 4), ("rewards", 32, 3), ("advantages", 32, 2)):
        assert len(found[name]["edges"]) == bins + 1 and len(found[name]["counts"]) == bins
        assert sum(found[name]["counts"]) == count
        assert found[name]["edges"] == sorted(found[name]["edges"])
    assert found["groups"] == {"right": [1, 0, 1, 0, 2]}
    assert found["lengths"]["counts"][0] == 1 and found["lengths"]["counts"][-1] >= 1
    assert value_edges([0.1, 0.9]) == value_edges([1.0]) and value_edges([0.0])[-1] == 1.0
    assert value_edges([-0.3, 3.0])[0] == -0.5 and value_edges([-0.3, 3.0])[-1] == 5.0
    assert length_edges(1)[-1] == 3.0 and length_edges(512)[-1] == 513.0
    assert set(distributions(1, [1], 4, [], [], None, 4)) == {"step", "lengths"}


def test_a_reader_of_a_folder_without_any_of_it(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)
    assert (reader.run(), reader.now(), reader.plan()) == ({}, {}, {})
    assert reader.events() == reader.distributions() == reader.sample_index() == reader.eval_results(0) == []
    assert reader.trace() == []


def test_a_reader_of_damaged_files_gives_the_rest(tmp_path: Path) -> None:
    (tmp_path / "now.json").write_text('{"at": 1')
    (tmp_path / "run.json").write_text("[1]")
    (tmp_path / "events.jsonl").write_text('{"text": "a"}\nnonsense\n{"text": "b"}\n')
    (tmp_path / "distributions.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 1, "x": 2}\n{"x": 3}\n{"step": 0}\n')
    (tmp_path / "trace.json").write_text(
        '[{"ph": "M"},\n{"ph": "M"}\n,{"ph": "X", "name": "a"}\n,oops\n,{"ph": "C"}\n,{"ph'
    )
    reader = RunReader(tmp_path)
    assert (reader.now(), reader.run()) == ({}, {})
    assert [event["text"] for event in reader.events()] == ["a", "b"]
    assert [(line.path.name, line.line) for line in reader.damaged_elsewhere] == [("events.jsonl", 2)]
    assert reader.distributions() == [{"step": 0}, {"step": 1, "x": 2}]
    assert [event["ph"] for event in reader.trace()] == ["M", "M", "X", "C"]
