"""Every example works as it stands: it loads, dry-runs and trains, with nothing but overrides for the sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

import trimtab
from tests.reward.local_judge import MODEL, LocalJudge
from trimtab.cli import app
from trimtab.config.algorithms import RECIPES
from trimtab.config.load import load_config
from trimtab.record.jsonl import read_jsonl

EXAMPLES = Path(__file__).parents[2] / "examples"
SFT = EXAMPLES / "sft.yaml"
PAIRS = EXAMPLES / "reward_model.yaml"
GSM8K = EXAMPLES / "gsm8k_smollm2.yaml"
JUDGE = EXAMPLES / "judge.yaml"
RECIPES_OF_ONE_FILE = [EXAMPLES / f"{name}.yaml" for name in ("dapo", "eight_bit", "lora")]
QUESTIONS = (GSM8K, JUDGE, *RECIPES_OF_ONE_FILE)
"""Rows with questions and answers are to be had."""
CALCULATOR = EXAMPLES / "calculator" / "calculator.yaml"
CONFIGS = [*sorted((EXAMPLES / "algorithms").glob("*.yaml")), *QUESTIONS, CALCULATOR]
FIRST_SFT = [EXAMPLES / "sft_then_grpo" / name for name in ("1_sft.yaml", "2_grpo.yaml", "run.sh")]
FIRST_PAIRS = [EXAMPLES / "ppo_reward_model" / name for name in ("1_reward_model.yaml", "2_ppo.yaml", "run.sh")]

TOY = [
    "learn.steps=2",
    "learn.prompts_per_step=4",
    "learn.max_new_tokens=8",
    "learn.lr=1e-3",
    "run.device=cpu",
    "run.threads=1",
    "run.reward_workers=1",
    "eval.limit=4",
    "observe.tensorboard=false",
]
SIGNAL = ['reward=[{fn: regex, args: {pattern: "[0-9]"}}]']
"""Random weights solve no task, but about half of their completions hold a digit."""


def name(path: Path) -> str:
    return path.stem


@pytest.fixture
def gsm8k_rows(tmp_path: Path) -> list[str]:
    rows = [{"question": f"What is {n} and 4?", "answer": f"{n} + 4 = {n + 4}\n#### {n + 4}"} for n in range(12)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.train={file}", f"data.eval={file}", "data.max_prompt_tokens=200", "learn.max_new_tokens=8"]


@pytest.fixture
def overrides(model_folder: Path, gsm8k_rows: list[str], request: pytest.FixtureRequest) -> Iterator[list[str]]:
    path = request.node.callspec.params["path"]
    common = [f"model.path={model_folder}", *(gsm8k_rows if path in QUESTIONS else [])]
    common += ["learn.overlong.buffer=4"] if path == EXAMPLES / "dapo.yaml" else []
    if path != JUDGE:
        yield common
        return
    server = LocalJudge("varied")
    yield [*common, f"reward.1.args.url={server.url}", f"reward.1.args.model={MODEL}"]
    server.stop()


def test_every_file_has_a_test() -> None:
    """One that is added without is found here."""
    there = {path for path in EXAMPLES.rglob("*.*") if path.suffix not in (".md", ".pyc")}
    code = {
        EXAMPLES / "rewards.py",
        CALCULATOR.parent / "warm_start.py",
    }  # the second: tests/rollout/conversations/test_learning.py
    notebooks = {EXAMPLES / "first_steps.ipynb", EXAMPLES / "own_reward.ipynb"}  # test_notebooks.py
    cluster = {path for path in there if path.parent.name == "cluster"}  # test_cluster_examples.py
    assert there == {*CONFIGS, SFT, PAIRS, *FIRST_SFT, *FIRST_PAIRS, *code, *notebooks, *cluster}


def test_every_algorithm_has_an_example() -> None:
    shown = {path.stem: load_config(path).learn.algorithm for path in (EXAMPLES / "algorithms").glob("*.yaml")}
    assert shown == {algorithm: algorithm for algorithm in RECIPES}


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_dry_runs(path: Path, overrides: list[str]) -> None:
    result = CliRunner().invoke(app, ["train", str(path), "--dry-run", "--json", *overrides])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["ok"]


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_trains(path: Path, overrides: list[str], model_folder: Path, tmp_path: Path) -> None:
    shown = load_config(path).learn
    sizes = [f"learn.samples_per_prompt={min(4, shown.samples_per_prompt)}", f"observe.dir={tmp_path / 'run'}"]
    if shown.updates_per_step > 1:
        sizes.append("learn.updates_per_step=2")
    if shown.schedule.warmup_steps:
        sizes.append("learn.schedule.warmup_steps=1")
    signal = [] if path == JUDGE else SIGNAL  # opinions differ, also on random weights
    summary = trimtab.train(path, overrides=[*overrides, *TOY, *signal, *sizes])
    assert summary["steps"] == 2
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    gaps = [
        row["rollout/logprob_gap"] for row in rows if "rollout/logprob_gap" in row
    ]  # none while only a critic learns
    assert gaps and max(gaps) < 1e-4
    assert changed(model_folder, tmp_path / "run" / "final")


def changed(before: Path, after: Path) -> bool:
    one, two = (load_file(folder / "model.safetensors") for folder in (before, after))
    return any(not torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("path", [JUDGE], ids=name)
def test_the_judge_is_asked_and_counted(path: Path, overrides: list[str], tmp_path: Path) -> None:
    sizes = ["learn.steps=1", "learn.samples_per_prompt=2", f"observe.dir={tmp_path / 'run'}"]
    trimtab.train(path, overrides=[*overrides, *TOY, *sizes])
    row = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert row["reward/failed"] == row["reward/judge/failed"] == 0
    assert row["reward/judge/scored"] + row["reward/judge/cache_hits"] == 8
    assert 0 < row["reward/judge"] <= 1


SMALL_SFT = ["learn.steps=2", "learn.epochs=1", "learn.sequences_per_step=4", "learn.schedule.warmup_steps=1"]
SMALL_PAIRS = ["learn.steps=2", "learn.pairs_per_step=4", "learn.max_tokens=64"]
QUIET = ["run.device=cpu", "observe.tensorboard=false"]


def stages(files: list[Path]) -> tuple[dict, dict]:
    """Both configs of a recipe of two stages; its script starts them in order, and the second says where the first ends."""
    lines = [line for line in files[2].read_text().splitlines() if line.startswith("trimtab ")]
    first, second = (yaml.safe_load(file.read_text()) for file in files[:2])
    assert lines == [
        f'trimtab {first["stage"]} "$here/{files[0].name}" --resume',
        f'trimtab train "$here/{files[1].name}" --resume',
    ]
    return first, second


def test_worked_answers_then_reinforcement(model_folder: Path, gsm8k_rows: list[str], tmp_path: Path) -> None:
    first, second = stages(FIRST_SFT)
    assert second["model"]["path"] == f"{first['observe']['dir']}/final"
    assert first["data"]["suffix"] == second["data"]["suffix"], "the second asks in the words of the first"
    folder = tmp_path / "sft"
    start = [f"model.path={model_folder}", f"observe.dir={folder}"]
    trimtab.sft(FIRST_SFT[0], overrides=[*start, *gsm8k_rows[:2], *SMALL_SFT, *QUIET])
    then = [f"model.path={folder / 'final'}", f"observe.dir={tmp_path / 'rl'}", "learn.samples_per_prompt=4"]
    summary = trimtab.train(FIRST_SFT[1], overrides=[*then, *gsm8k_rows, *TOY, *SIGNAL])
    assert summary["steps"] == 2
    assert changed(model_folder, folder / "final") and changed(folder / "final", tmp_path / "rl" / "final")


def test_pairs_then_ppo(model_folder: Path, gsm8k_rows: list[str], tmp_path: Path) -> None:
    first, second = stages(FIRST_PAIRS)
    assert second["reward"] == [{"fn": f"model:{first['observe']['dir']}/final"}]
    folder = tmp_path / "reward"
    start = [f"model.path={model_folder}", f"observe.dir={folder}", *pair_rows(tmp_path)]
    trimtab.reward_model(FIRST_PAIRS[0], overrides=[*start, *SMALL_PAIRS, *QUIET])
    then = [f"model.path={model_folder}", f"observe.dir={tmp_path / 'rl'}", f"reward.0.fn=model:{folder / 'final'}"]
    rows = [gsm8k_rows[0], "data.prompt=question", *gsm8k_rows[2:]]
    sizes = ["learn.critic.warmup_steps=1", *(line for line in TOY if not line.startswith("eval."))]
    summary = trimtab.train(FIRST_PAIRS[1], overrides=[*then, *rows, *sizes])
    found = read_jsonl(Path(summary["run_dir"]) / "metrics.jsonl")
    assert summary["steps"] == 2 and "value/explained_variance" in found[-1] and found[-1]["reward/failed"] == 0
    assert changed(model_folder, tmp_path / "rl" / "final")


def test_worked_answers(model_folder: Path, gsm8k_rows: list[str], tmp_path: Path) -> None:
    summary = trimtab.sft(
        SFT,
        model=str(model_folder),
        overrides=[*gsm8k_rows[:2], *SMALL_SFT, *QUIET, f"observe.dir={tmp_path / 'run'}"],
    )
    assert summary["steps"] == 2 and summary["eval"]["loss after"] < summary["eval"]["loss before"]


def pair_rows(tmp_path: Path) -> list[str]:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 2)} for n in range(12)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.train={file}", f"data.eval={file}"]


def test_pairs(model_folder: Path, tmp_path: Path) -> None:
    given = [*SMALL_PAIRS, *QUIET, *pair_rows(tmp_path), f"observe.dir={tmp_path / 'run'}"]
    summary = trimtab.reward_model(PAIRS, model=str(model_folder), overrides=given)
    assert summary["steps"] == 2 and 0 <= summary["accuracy"] <= 1


@pytest.mark.parametrize("function", ["shows_work", "closeness"])
def test_reward_file(function: str, model_folder: Path, tmp_path: Path) -> None:
    summary = trimtab.train(
        EXAMPLES / "algorithms" / "grpo.yaml",
        model=str(model_folder),
        reward={"fn": f"../rewards.py:{function}", "name": "own"},
        overrides=[*TOY, "learn.steps=1", "learn.samples_per_prompt=2", f"observe.dir={tmp_path / 'run'}"],
    )
    row = read_jsonl(Path(summary["run_dir"]) / "metrics.jsonl")[-1]
    assert row["reward/failed"] == 0
    assert 0 <= row["reward/own"] <= 1
