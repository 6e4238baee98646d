"""`trimtab tune` on this machine, with the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from tests.forked_ranks import fork_ranks
from tests.running import left
from trimtab.cli import app
from trimtab.config.load import load_config
from trimtab.plan.trials import Trial
from trimtab.run.tuner import slowest


@pytest.fixture
def config(tmp_path: Path, model_folder: Path, monkeypatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "run.yaml"
    learn = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 6, "steps": 1}
    content = {"model": {"path": str(model_folder)}, "data": {"train": "task:arithmetic"}, "reward": [{"fn": "task"}]}
    file.write_text(yaml.safe_dump(content | {"learn": learn, "observe": {"dir": str(tmp_path / "run")}}))
    return file


def test_what_it_finds_is_written_and_kept_and_used(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned.yaml"
    result = CliRunner().invoke(app, ["tune", str(config), "--out", str(out), "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert {trial["key"] for trial in found["trials"]} == {"token_budget", "max_sequences"}
    assert all(trial["rate"] > 0 for trial in found["trials"])
    run = load_config(out, []).run
    assert run.token_budget == found["tuned"]["run.token_budget"] and "auto" not in run.model_dump().values()
    assert Path(found["cache"]).exists() and not (tmp_path / "run").exists()
    trained = CliRunner().invoke(app, ["train", str(config), "--json"])
    assert trained.exit_code == 0, trained.stderr
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    words = {choice["key"]: choice["why"] for choice in plan["choices"]}
    assert words["run.token_budget"].startswith("measured by trimtab tune on")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shard", ["optimizer", pytest.param("full", marks=pytest.mark.slow)])
def test_ranks_are_timed_together(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str) -> None:
    fork_ranks(monkeypatch)
    before = set(psutil.Process().children(recursive=True))
    keys = ["run.device=cpu", "run.devices=2", f"run.shard={shard}", "run.threads=1"]
    result = CliRunner().invoke(app, ["tune", str(config), *keys, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert {trial["key"] for trial in found["trials"]} == {"token_budget", "max_sequences"}
    assert all(trial["rate"] > 0 for trial in found["trials"]) and found["run"]["devices"] == 2
    assert not left(set(psutil.Process().children(recursive=True)) - before)
    assert not (tmp_path / "run").exists()
    trained = CliRunner().invoke(app, ["train", str(config), *keys, "--json"])
    assert trained.exit_code == 0, trained.output
    choices = json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]
    assert "measured by trimtab tune" in next(c["why"] for c in choices if c["key"] == "run.token_budget")


def test_a_budget_that_fits_on_one_rank_only_does_not_fit() -> None:
    fits, not_here = Trial("token_budget", 64, 10.0, 5), Trial("token_budget", 64, None, None)
    assert slowest([fits, Trial("token_budget", 64, 8.0, 7)]) == Trial("token_budget", 64, 8.0, 7)
    assert slowest([fits, not_here]).rate is None


def test_a_file_that_is_there_is_never_written_over(config: Path, monkeypatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured before the place was looked at")

    monkeypatch.setattr("trimtab.run.tune.run_tuning", measured)
    before = config.read_text()
    result = CliRunner().invoke(app, ["tune", str(config), "--out", str(config), "--json"])
    assert result.exit_code == 2 and "already exists. Remove it, or give --out another name" in result.stderr
    assert json.loads(result.stdout)["kind"] == "ConfigError" and config.read_text() == before


def test_bad_input_is_told_before_anything_is_loaded(config: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune", str(config), "--out", str(tmp_path / "no" / "file.yaml")])
    assert result.exit_code == 2 and "is not a folder" in result.stderr
    result = CliRunner().invoke(app, ["tune", str(config), "run.token_budget=1"])
    assert result.exit_code == 2 and "token_budget" in result.stderr
