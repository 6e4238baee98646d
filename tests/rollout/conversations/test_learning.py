"""It learns: a short run from random weights, and the calculator example shortened."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trimtab
from tests.rollout.conversations.worlds import Echo
from trimtab.record.sinks import read_metrics

EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator"
ROWS = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(5)]


@pytest.mark.slow
def test_a_reward_that_only_an_environment_gives_is_learned_and_repeats_exactly(model_folder, tmp_path) -> None:
    """Thirty steps on a reward that any policy can raise, given turn by turn: more of the letter a."""
    weights, rewards = [], []
    for name in ("one", "two"):
        trimtab.train(
            model=str(model_folder), data=ROWS, reward={"fn": "environment"}, environment={"fn": Echo, "args": {"turns": 2}},
            learn={
                "steps": 30, "prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 24, "lr": 3e-3,
                "sampling": {"stop_token_ids": list(range(3, 20))},
            },
            run={"reward_workers": 1 if name == "one" else 2}, observe={"dir": str(tmp_path / name), "tensorboard": False},
        )  # fmt: skip
        weights.append(load_file(tmp_path / name / "final/model.safetensors"))
        rewards.append([row["reward/mean"] for row in read_metrics(tmp_path / name)])
    assert rewards[0] == rewards[1]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert sum(rewards[0][-5:]) / 5 > sum(rewards[0][:5]) / 5 + 0.3


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calculator_start", EXAMPLE / "warm_start.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_calculators_warm_start_says_what_it_does_and_takes_one_thread(tmp_path, monkeypatch) -> None:
    """Two threads take ten times as long on two busy cores; its minute is that of one."""
    module, said, threads = load_example(), list[str](), list[int]()
    monkeypatch.setattr(module, "TOLD_EVERY", 2)
    step = module.Updater.step

    def counted(*arguments: Any) -> Any:
        threads.append(torch.get_num_threads())
        return step(*arguments)

    monkeypatch.setattr(module.Updater, "step", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        losses = module.make(tmp_path / "start", phases=((2, 0.5), (1, 0.05)), say=said.append)
    finally:
        torch.set_num_threads(before)
    assert threads == [1, 1, 1] == [1] * len(losses)
    assert said[0].startswith("Teaching a new model of 0.9 million parameters how a calculator is called")
    assert "2 with the calculator in 50% of the answers and 1 with the calculator in 5%" in said[0]
    assert [line.split(" | ")[0] for line in said[1:]] == ["step 2/3", "step 3/3"]
    assert "5% of the answers" in said[2] and said[2].endswith("| 0 s left")
    assert (tmp_path / "start" / "config.json").is_file()


@pytest.mark.slow
def test_the_calculator_is_used_more_and_more(tmp_path) -> None:
    load_example().make(tmp_path / "start", phases=((140, 0.5), (40, 0.05)))
    overrides = [
        f"model.path={tmp_path / 'start'}", f"observe.dir={tmp_path / 'run'}", "learn.steps=14", "run.threads=1", "eval.limit=64",
        "observe.eval_every=0",
    ]  # fmt: skip
    summary = trimtab.train(EXAMPLE / "calculator.yaml", overrides=overrides)
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert rows[-1]["environment/tool_calls"] > rows[0].get("environment/tool_calls", 0.0) + 0.3
    assert summary["eval"]["before"] < 0.05
    assert summary["eval"]["after"] > 0.25
