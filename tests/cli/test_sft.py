"""`trimtab sft` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trimtab.cli import app

ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(5) for b in range(5)]


@pytest.fixture
def config(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tree = {
        "stage": "sft",
        "model": {"path": str(model_folder)},
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl"},
        "learn": {"epochs": 1, "sequences_per_step": 8},
        "observe": {"dir": "run", "tensorboard": False},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "sft.yaml"


def test_a_run_ends_with_one_json_object_and_goes_on_when_resumed(config: Path) -> None:
    done = CliRunner().invoke(app, ["sft", str(config), "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 4 and summary["eval"]["loss after"] < summary["eval"]["loss before"]
    again = CliRunner().invoke(app, ["sft", str(config), "--json"])
    assert again.exit_code == 2 and "already holds a run" in again.stderr
    more = CliRunner().invoke(app, ["sft", "run/config.yaml", "learn.steps=6", "--resume", "--json"])
    assert more.exit_code == 0, more.output
    assert json.loads(more.stdout.splitlines()[-1])["steps"] == 6
    assert CliRunner().invoke(app, ["export", "run", "out"]).exit_code == 0
    looked = CliRunner().invoke(app, ["doctor", "run"])
    assert looked.exit_code == 0 and "6 of 6, finished" in looked.stdout


def test_a_dry_run_writes_nothing(config: Path) -> None:
    done = CliRunner().invoke(app, ["sft", str(config), "--dry-run", "--json"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("first_example").endswith("<eos>") and found.pop("last_tokens")[-1] == '"<eos>" (2)'
    assert (found.pop("stop_token_ids"), found.pop("stop"), found.pop("warnings")) == ([2], [], [])
    assert found.pop("plan")["devices"] == 1
    assert found | {"run_dir": ""} == {
        "ok": True, "run_dir": "", "train_rows": 25, "eval_rows": 25, "longest_tokens": 6, "steps": 4,
    }  # fmt: skip
    assert not (config.parent / "run").exists()


def test_a_plan_of_it_has_no_rollout(config: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(config), "model.path=qwen2.5-0.5b", "--device", "h200", "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout.splitlines()[-1])
    assert plan["fits"] and "rollout" not in {phase["name"] for phase in plan["phases"]}
    assert plan["step_seconds"]["rollout"] == 0 and plan["step_seconds"]["update"] > 0


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["train"], "this config is for trimtab sft"),
        (["sft", "learn.samples_per_prompt=4"], "unknown key"),
        (["sft", "reward.0.fn=math"], "unknown key"),
        (["sft", "data.completion=answer"], "no column 'answer'"),
        (["sft", "learn.loss_on=user"], "one of assistant, last, all"),
        (["sft", "observe.samples_every=3"], "has no effect"),
        (["sft", "data.task=kind"], "it divides samples by task, and this stage samples nothing"),
        (["sft", "observe.kl_bands={a: [0, 1]}"], "it divides samples by task, and this stage samples nothing"),
        (["sft", "model.path=missing"], "missing"),
    ],
)
def test_bad_input_is_told(command: list[str], says: str, config: Path) -> None:
    name, *overrides = command
    done = CliRunner().invoke(app, [name, str(config), *overrides])
    assert done.exit_code == 2
    assert says in done.stderr
    assert not (config.parent / "run").exists()


def test_a_reward_model_from_the_command_line(config: Path) -> None:
    rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "x"} for row in ROWS]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = yaml.safe_load(config.read_text())
    tree |= {"stage": "reward-model", "data": {"train": "pairs.jsonl"}, "learn": {"epochs": 1, "pairs_per_step": 8}}
    Path("rm.yaml").write_text(yaml.safe_dump(tree))
    done = CliRunner().invoke(app, ["reward-model", "rm.yaml", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 4
    assert json.loads((config.parent / "run" / "final" / "reward.json").read_text())["std"] > 0
    look = CliRunner().invoke(app, ["reward-model", "rm.yaml", "--dry-run", "observe.dir=other"])
    assert look.exit_code == 0 and not (config.parent / "other").exists()
    plan = CliRunner().invoke(app, ["plan", "rm.yaml", "model.path=qwen2.5-0.5b", "--device", "h200", "--json"])
    assert json.loads(plan.stdout.splitlines()[-1])["fits"]
    wrong = CliRunner().invoke(app, ["sft", "rm.yaml"])
    assert wrong.exit_code == 2 and "this config is for trimtab reward-model" in wrong.stderr


def test_a_configuration_of_training_is_not_one_of_this(tmp_path: Path) -> None:
    (tmp_path / "rl.yaml").write_text("model: {path: m}\ndata: {train: a.jsonl}\nreward: [{fn: math}]\n")
    done = CliRunner().invoke(app, ["sft", str(tmp_path / "rl.yaml")])
    assert done.exit_code == 2 and "reward: unknown key" in done.stderr
