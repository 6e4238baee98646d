"""A folder holds one run, one process writes to it, and a run that never starts leaves none."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trimtab.base.errors import ConfigError
from trimtab.config.load import config_from_dict, load_config
from trimtab.config.schema import Config
from trimtab.record.folder import begin, changes, claim, find_folder, refuse_existing


def config(**learn: Any) -> Config:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": [{"fn": "exact_match"}]}
    return config_from_dict(tree | {"learn": learn})


def run_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    begin(folder, config(), {})
    return folder


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert find_folder("runs/x", "n", False) == tmp_path / "runs/x"
    assert find_folder("~/{name}", "n", False) == tmp_path / "home/n"
    stamped = find_folder("runs/{name}-{time}", "n", False).name
    assert time.strptime(stamped, "n-%Y%m%d-%H%M%S")


def test_resume_finds_the_newest_run_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a-20250101-000000", "a-20260101-000000", "a-b-20270101-000000", "a-zzz"):
        run_in(tmp_path / "runs" / name)
    (tmp_path / "runs/a-20280101-000000").mkdir()  # of a run that never started
    for pattern in (str(tmp_path / "runs/{name}-{time}"), "~/runs/{name}-{time}"):
        assert find_folder(pattern, "a", True).name == "a-20260101-000000"
        assert find_folder(pattern, "a-b", True).name == "a-b-20270101-000000"
        assert not find_folder(pattern, "new", True).exists()
        assert not find_folder(pattern, "a", False).exists()


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    run_in(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"observe\.dir: .*/run already holds a run\. Continue it with --resume"):
        refuse_existing(tmp_path / "run", resume=False)
    with pytest.raises(ConfigError, match="already holds a run"), claim(tmp_path / "run", resume=False):
        pytest.fail("claimed")
    with claim(tmp_path / "run", resume=True):
        pass


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from trimtab.record.folder import claim\n"
        "with claim(Path(sys.argv[1]), True): print('held', flush=True); sys.stdin.read()"
    )
    run = run_in(tmp_path / "run")
    command = [sys.executable, "-c", hold, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is running in"), claim(run, True):
            pytest.fail("claimed twice")
        other.kill()
    with claim(run, True):  # a kill releases it
        pass


def test_a_run_that_never_starts_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claim(tmp_path / "deep/er/run", False):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("kept")
    with pytest.raises(RuntimeError), claim(tmp_path / "mine", False):
        raise RuntimeError
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"observe\.dir: cannot write to .*/file/run: Not a directory"),
        claim(tmp_path / "file/run", False),
    ):
        pytest.fail("claimed")


def test_begin_writes_a_config_that_loads(tmp_path: Path) -> None:
    begin(tmp_path, config(lr=0.5), {})
    assert load_config(tmp_path / "config.yaml").learn.lr == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "plan.json"]


@pytest.mark.parametrize("holds_a_run", [True, False])
def test_what_a_kill_left_half_written_goes_with_the_next_claim_of_that_run(tmp_path: Path, holds_a_run: bool) -> None:
    """Only there: a folder of somebody's own may hold anything."""
    if holds_a_run:
        begin(tmp_path, config(), {})
    leftovers = {".writing-final", "checkpoints/.writing-step-2", "checkpoints/.deleting-step-1"}
    for name in (*leftovers, "final", "checkpoints/step-3"):
        (tmp_path / name / "x").mkdir(parents=True)
    with claim(tmp_path, True):
        assert {name for name in leftovers if (tmp_path / name).exists()} == (set() if holds_a_run else leftovers)
        assert (tmp_path / "final/x").exists() and (tmp_path / "checkpoints/step-3/x").exists()


def test_changes_are_what_would_be_learned_otherwise() -> None:
    held = config(steps=10, lr=0.5)
    assert changes(held, config(steps=10, lr=0.5)) == []
    assert changes(held, config(steps=20, lr=0.5)) == [], "a run may grow"
    assert changes(held, config(steps=5, lr=0.5)) == ["learn.steps 5 (was 10)"]
    assert changes(held, config(steps=10, lr=0.25)) == ["learn.lr 0.25 (was 0.5)"]
    tree = config(steps=10, lr=0.5).model_dump()
    other = config_from_dict(
        tree
        | {"run": {"token_budget": 9999}, "observe": {"checkpoint_every": 1}, "model": {"path": "other"}}
        | {"reward": [{"fn": "exact_match", "weight": 2.0}, {"fn": "length", "args": {"max_tokens": 5}}]}
    )
    found = changes(held, other)
    assert found[0] == "model.path other (was m)"
    assert {line.split()[0] for line in found} == {
        "model.path", "reward.0.weight", "reward.1.fn", "reward.1.weight", "reward.1.timeout_s",
        "reward.1.args.max_tokens", "reward.1.normalize",
    }  # fmt: skip
