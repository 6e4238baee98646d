"""metrics.jsonl of a run that was killed reads like that of a run that was not; TensorBoard and W&B agree with it."""

import errno
import io
import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trimtab.base.errors import ConfigError, DataError
from trimtab.config.schema import Observe
from trimtab.record import jsonl
from trimtab.record.jsonl import read_jsonl
from trimtab.record.sinks import Sinks, read_metrics

PLAIN = Observe(tensorboard=False)


def write_steps(run_dir, steps, observe=PLAIN, resume_step=None, value=1.0):
    sinks = Sinks(run_dir, observe, resume_step)
    for step in steps:
        sinks.write(step, {"reward/mean": step * value})
    sinks.close()


def steps_of(run_dir):
    return [row["step"] for row in read_metrics(run_dir)]


def scalars(run_dir, tag):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def test_a_line_is_one_strict_json_object_with_step_first(tmp_path):
    sinks = Sinks(tmp_path, PLAIN, None)
    sinks.write(3, {"reward/mean": 0.5, "a": math.nan, "b": math.inf, "c": np.float32(0.25), "d": 7, "e": None})
    line = '{"step": 3, "reward/mean": 0.5, "a": null, "b": null, "c": 0.25, "d": 7, "e": null}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == line  # there before close: a kill loses nothing


def test_no_file_reads_as_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 2, 10, 25])
def test_a_last_line_torn_by_a_kill_is_dropped_by_reader_and_by_resume(tmp_path, cut):
    write_steps(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    whole = [1, 2, 3] if cut == 1 else [1, 2]  # without its newline only, the line is whole
    assert steps_of(tmp_path) == whole
    write_steps(tmp_path, [4], resume_step=3)
    assert steps_of(tmp_path) == [*whole, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_resume_removes_the_steps_that_will_be_repeated(tmp_path):
    write_steps(tmp_path, [0, 1, 2, 3, 4, 5])
    write_steps(tmp_path, [4], resume_step=3, value=10.0)
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
    ]


def test_a_new_run_keeps_nothing(tmp_path):
    write_steps(tmp_path, [1, 2])
    write_steps(tmp_path, [1])
    assert steps_of(tmp_path) == [1]


def test_resume_leaves_no_file_aside(tmp_path):
    write_steps(tmp_path, [1, 2])
    write_steps(tmp_path, [], resume_step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_damage_that_no_kill_explains_is_an_error_that_names_the_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(tmp_path)


def test_tensorboard_reads_the_scalars_before_close(tmp_path):
    sinks = Sinks(tmp_path, Observe(), None)
    sinks.write(1, {"reward/mean": 0.25, "policy/loss": math.nan})
    sinks.write(2, {"reward/mean": 0.5, "policy/loss": -1.0})
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert scalars(tmp_path, "policy/loss") == [(2, -1.0)]
    sinks.close()


def test_tensorboard_shows_a_resumed_run_as_one_line(tmp_path):
    write_steps(tmp_path, [1, 2, 3, 4], Observe())
    write_steps(tmp_path, [3, 4, 5], Observe(), resume_step=2, value=10.0)
    assert scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


def test_tensorboard_can_be_off(tmp_path):
    write_steps(tmp_path, [1])
    assert not (tmp_path / "tensorboard").exists()


def test_wandb_missing_names_the_extra_and_touches_nothing(tmp_path, monkeypatch):
    write_steps(tmp_path, [1, 2])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"observe\.wandb.*trimtab\[wandb\]"):
        Sinks(tmp_path, Observe(wandb="project", tensorboard=False), None)
    assert steps_of(tmp_path) == [1, 2]


class FakeWandbRun:
    def __init__(self):
        self.logged, self.defined, self.finished = [], [], False

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, row):
        self.logged.append(row)

    def finish(self):
        self.finished = True


def test_wandb_resumes_the_run_whose_id_is_in_the_folder(tmp_path, monkeypatch):
    inits, run = [], FakeWandbRun()
    fake = types.SimpleNamespace(init=lambda **kwargs: inits.append(kwargs) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    observe = Observe(wandb="project", tensorboard=False)
    write_steps(tmp_path, [1, 2], observe)
    write_steps(tmp_path, [2], observe, resume_step=1)
    write_steps(tmp_path, [1], observe)
    ids = [init["id"] for init in inits]
    assert ids[0] == ids[1] != ids[2]
    assert {(init["project"], init["resume"]) for init in inits} == {("project", "allow")}
    assert run.logged == [{"step": step, "reward/mean": float(step)} for step in (1, 2, 2, 1)]
    assert all(init["config"] == {} for init in inits)  # no config.yaml was there
    assert run.defined[0] == ("*", "step")
    assert run.finished


class Narrow(io.FileIO):
    """A disk that takes a few bytes at a time, and after so many no more."""

    room = 10**9

    def write(self, data) -> int:  # type: ignore[override]
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(7, self.room, len(data))
        self.room -= taken
        return super().write(data[:taken])


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = Narrow(tmp_path / "m.jsonl", "a")
    jsonl.append_whole(file, b'{"step": 1, "loss": 0.5}\n')
    file.room = 9
    with pytest.raises(OSError, match="No space left"):
        jsonl.append_whole(file, b'{"step": 2, "loss": 0.25}\n')
    file.room = 10**9
    jsonl.append_whole(file, b'{"step": 3, "loss": 0.125}\n')
    assert [row["step"] for row in read_jsonl(tmp_path / "m.jsonl")] == [1, 3]


def test_a_row_without_a_step_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0}\n{"step": 1}\n{"step": 9}\n')
    Sinks(tmp_path, Observe(tensorboard=False), 1).close()
    assert read_metrics(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2: not a JSON object"),
        ("3", "line 2: not a JSON object"),
        ("[" * 100_000, "line 2: the JSON is nested too deeply"),
        ('{"step": [2]}', "a row has the step"),
        ('{"step": "two"}', "a row has the step 'two', which is not a number"),
    ],
    ids=["list", "number", "deep", "step of a list", "step of a text"],
)
def test_a_row_that_no_run_wrote_is_an_error_for_who_resumes(tmp_path, line, message):
    write_steps(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        write_steps(tmp_path, [2], resume_step=1)
