"""`trimtab plan` for a cluster: placements, roles, runners-up, and a simulated timeline; and what `train` refuses of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trimtab.cli import app

CONFIG = {
    "model": {"path": "Qwen/Qwen2.5-7B-Instruct"},
    "data": {"train": "task:arithmetic", "max_prompt_tokens": 256},
    "reward": [{"fn": "task"}],
    "learn": {"prompts_per_step": 64, "samples_per_prompt": 8, "max_new_tokens": 1024},
}
CLUSTER = ("--device", "h100", "--host-memory", "1000GiB")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    return file


def plan(*arguments: object) -> tuple[dict[str, Any], str]:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_a_cluster_is_planned_with_runners_up(config: Path) -> None:
    found, shown = plan(config, *CLUSTER, "--devices", 16, "--devices-per-host", 4)
    assert found["placement"]["kind"] == "colocated" and found["placement"]["hosts"] == 4
    assert [role["role"] for role in found["roles"]] == ["actor", "rollout"] and found["roles"][0]["devices"] == 16
    late = [one for one in found["runners_up"] if one["staleness"] == 1]
    assert late and late[0]["runs_in_this_version"]
    assert "runner-up" in shown and "learn.staleness: 1" in shown
    assert found["tokens_per_device_second"] == pytest.approx(
        64 * 8 * (256 + 1024) / found["step_seconds"]["total"] / 16, rel=1e-3
    )


def test_a_pinned_split_is_planned_by_role_and_simulated(config: Path, tmp_path: Path) -> None:
    split = ("run.placement={actor: 4, rollout: 4}", *CLUSTER)
    page = tmp_path / "timeline.html"
    asked = ("--simulate", "--lengths", "p50=300,p90=800,max=1024", "--steps", "3", "--html", page)
    found, shown = plan(config, *split, *asked)
    assert found["devices"] == 8 and found["placement"]["kind"] == "split"
    assert "only predicted" not in shown and "engine 3" in shown
    simulated = found["simulation"]
    assert simulated["engines"] == 4 and sum(simulated["sequences"]) == 3 * 64 * 8 and len(simulated["steps"]) == 3
    assert simulated["step_seconds"] == pytest.approx(found["step_seconds"]["total"], rel=0.15)
    assert page.read_text().startswith("<!doctype html>") and "engine 3" in page.read_text()
    again, _ = plan(config, *split, *asked)
    other, _ = plan(config, *split, *asked, "--seed", 1)
    assert again["simulation"] == simulated != other["simulation"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run.placement={actor: 4, rolout: 4}"], "is not a role"),
        (
            ["run.placement={actor: 40, rollout: 4}", "--devices", "8"],
            "needs 44 devices, but the planned machine has 8",
        ),
        (["--simulate", "--lengths", "nonsense"], "--lengths"),
        (["--times", "nowhere"], "has no effect without --simulate"),
        (["--simulate", "--times", "nowhere"], "has no trace.json"),
        (["--like", "here", "--lengths", "p50=3"], "Leave one of the two out"),
        (["--html", "/nowhere/at/all.html"], "cannot write"),
    ],
)
def test_bad_input_is_told(config: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["plan", str(config), *CLUSTER, *arguments])
    assert result.exit_code and words in " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("split", "does not say how many devices generate"),
        ("{actor: 2}", "puts all roles on the same devices. Write run.devices: 2 instead"),
    ],
)
def test_train_refuses_what_it_cannot_run_before_it_looks_for_the_model(
    config: Path, tmp_path: Path, placement: str, words: str
) -> None:
    asked = ["train", str(config), f"run.placement={placement}", "run.device=cpu", f"observe.dir={tmp_path / 'run'}"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code and words in " ".join(result.stderr.split())
    assert not (tmp_path / "run").exists()
