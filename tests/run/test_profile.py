"""A run that is profiled learns the same, and leaves its tables."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.forked_ranks import fork_ranks
from trimtab.api import run_training
from trimtab.base.errors import ConfigError
from trimtab.cli import app
from trimtab.config.load import config_from_dict
from trimtab.observe.profiling.request import ProfileRequest
from trimtab.run.inputs import Inputs

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def train(model: Path, folder: Path, asked: ProfileRequest | None, devices: int = 1, resume: bool = False) -> Path:
    config = config_from_dict(
        {
            "model": {"path": str(model)},
            "data": {"train": "object:rows"},
            "reward": [{"fn": "exact_match"}, {"fn": "object:length"}],
            "learn": {"steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 6, "lr": 1e-3},
            "run": {"device": "cpu", "threads": 1, "reward_workers": 1, "devices": devices},
            "observe": {"dir": str(folder), "tensorboard": False},
        }
    )
    rewards = {"length": lambda completions, **_: [float(len(set(text))) for text in completions]}
    run_training(config, Inputs(train_rows=ROWS, rewards=rewards, profile=asked), resume=resume)
    return folder


@pytest.fixture(scope="module")
def plain(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(model_folder, tmp_path_factory.mktemp("plain") / "run", None)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final/model.safetensors")


def test_nothing_that_is_learned_changes_and_the_tables_are_written(
    plain: Path, model_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(model_folder, tmp_path / "run", ProfileRequest(2, 3))
    assert all(torch.equal(found, weights(run)[name]) for name, found in weights(plain).items())
    assert not (plain / "profile").exists()
    assert {path.name for path in (run / "profile").iterdir()} == {"kernels.json", "trace-rank-0.json.gz"}
    found = json.loads((run / "profile/kernels.json").read_text())
    assert found["steps"] == [2, 3] and found["rank"] == 0 and found["device"] == "cpu"
    assert {"rollout", "update"} <= {row["phase"] for row in found["kernels"]}
    assert any(row["name"] == "aten::mm" or row["name"] == "aten::addmm" for row in found["kernels"])
    assert 0.5 < sum(row["share"] for row in found["kernels"]) <= 1.0 + 1e-9
    trace = json.loads(gzip.decompress((run / "profile" / found["trace"]).read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"trimtab:rollout", "trimtab:update"} <= names
    assert "profile of steps 2 to 3: profile/kernels.json in the run folder" in capfd.readouterr().out


def test_steps_that_the_run_does_not_have_are_refused_before_anything_is_loaded(
    model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--profile-steps: step 4 is beyond the last step of this run, 3"):
        train(model_folder, tmp_path / "run", ProfileRequest(4, 4))
    with pytest.raises(ConfigError, match="--profile-ranks: there is no rank 1: this run has one device"):
        train(model_folder, tmp_path / "run", ProfileRequest(1, 1, (1,)))
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_resumed_run_says_that_the_steps_are_done(plain: Path, model_folder: Path, capfd) -> None:
    train(model_folder, plain, ProfileRequest(1, 2), resume=True)
    assert "--profile-steps: step 2 and those before it are done already" in capfd.readouterr().out
    assert not (plain / "profile").exists()


@pytest.mark.usefixtures("forked")
def test_the_named_ranks_profile_themselves(plain: Path, model_folder: Path, tmp_path: Path) -> None:
    run = train(model_folder, tmp_path / "run", ProfileRequest(2, 2, (1, 0)), devices=2)
    names = {path.name for path in (run / "profile").iterdir()}
    assert names == {"kernels.json", "trace-rank-1.json.gz", "kernels-rank-0.json", "trace-rank-0.json.gz"}
    first, other = (
        json.loads((run / "profile" / name).read_text()) for name in ("kernels.json", "kernels-rank-0.json")
    )
    assert (first["rank"], other["rank"]) == (1, 0)
    assert {"rollout", "update"} <= {row["phase"] for row in first["kernels"]}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)


@pytest.mark.parametrize("command", ["train", "sft", "reward-model"])
def test_the_command_line_tells_of_a_bad_range_at_once(command: str) -> None:
    done = CliRunner().invoke(app, [command, "none.yaml", "--profile-steps", "5:3"])
    assert done.exit_code == 2 and "--profile-steps: '5:3' ends before it begins. Write 3:5." in done.output
