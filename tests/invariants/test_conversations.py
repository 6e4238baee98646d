"""The laws where completions are conversations: the gradient under every `run` key (1), resume (6), and the counts (9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.invariants.test_gradient_invariance import CASES, TOLERANCE, assert_same_gradient, step
from tests.quick_rewards import seen
from tests.rollout.conversations.worlds import Chance, Moody
from trimtab.base.errors import RewardError
from trimtab.record.jsonl import read_jsonl
from trimtab.update.updater import Updater

TALKS = {"environment": {"fn": "worlds.py:Chance", "max_turns": 3}}
LEARN = {"max_new_tokens": 30, "sampling": {"stop_token_ids": list(range(3, 30))}}
OTHERS = {"token_budget": [52], "score_token_budget": [52], "rollout.kv_memory": ["56KiB"]}
"""Sequences are longer here."""
WALKED = [(key, value) for key, values in CASES.items() for value in OTHERS.get(key, values)[:2] if key != "device"]


@pytest.fixture(scope="module")
def baseline(model_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return step(model_folder, tmp_path_factory.mktemp("baseline"), learn=LEARN, **TALKS)


@pytest.mark.parametrize(("key", "value"), WALKED)
def test_gradient_and_tokens_are_the_same(model_folder: Path, tmp_path: Path, baseline, key: str, value: Any) -> None:
    tokens, gradients = step(model_folder, tmp_path, key, value, learn=LEARN, **TALKS)
    assert tokens == baseline[0]
    assert_same_gradient(baseline[1], gradients, TOLERANCE.get(key, 1e-9))


ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(5)]


def train(model_folder: Path, folder: Path, environment: Any, **changes: Any) -> list[dict[str, Any]]:
    usual = {
        "data": ROWS[:20], "eval_data": ROWS[20:], "reward": [{"fn": "environment"}],
        "environment": {"fn": environment, "max_turns": 3},
        "learn": {
            "steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 30, "lr": 1e-3,
            "sampling": {"stop_token_ids": list(range(3, 30))},
        },
        "observe": {"max_failed_rewards": 0.9, "samples_every": 1},
    }  # fmt: skip
    return running.train(model_folder, folder, usual, changes).metrics


@pytest.mark.parametrize("learn", [{}, {"updates_per_step": 2, "kl": {"coef": 0.1}}, {"algorithm": "ppo"}], ids=str)
def test_a_resumed_run_has_the_weights_of_one_that_was_not_stopped(model_folder, tmp_path, learn: dict) -> None:
    observe = {"checkpoint_every": 2}
    train(model_folder, tmp_path / "whole", Chance, learn={"steps": 4, **learn}, observe=observe)
    train(model_folder, tmp_path / "half", Chance, learn={"steps": 2, **learn}, observe=observe)
    changed = {"run": {"reward_workers": 3, "token_budget": 100}} if not learn else {}
    metrics = train(
        model_folder, tmp_path / "half", Chance, learn={"steps": 4, **learn}, observe=observe, resume=True, **changed
    )
    one, two = (load_file(tmp_path / name / "final/model.safetensors") for name in ("whole", "half"))
    same = torch.equal if not changed else lambda a, b: torch.allclose(a, b, atol=1e-6)
    assert all(same(one[name], two[name]) for name in one)
    assert metrics[-1]["environment/turns_mean"] > 1


def test_sampled_equals_trained_plus_dropped_and_only_own_tokens_are_trained_on(
    model_folder, tmp_path, monkeypatch
) -> None:
    learned: list[int] = []
    original = Updater.accumulate

    def watched(self, samples, kl_coef):
        stats = original(self, samples, kl_coef)
        assert stats.tokens == sum(len(s.engine_logprobs) for s in samples)
        assert any(s.policy_mask is not None for s in samples)
        learned.append(len(samples))
        return stats

    monkeypatch.setattr(Updater, "accumulate", watched)
    metrics = [row for row in train(model_folder, tmp_path / "run", Moody) if row["step"] > 0]
    for row, trained in zip(metrics, learned, strict=True):
        dropped = {key: value for key, value in row.items() if key.startswith("run/dropped_")}
        assert row["run/samples"] == 16 == row["run/samples_trained"] + sum(dropped.values())
        assert trained + row["run/samples_without_gradient"] == row["run/samples_trained"]
        assert row["environment/failed"] == row.get("run/dropped_environment_failed", 0)
        assert row["reward/failed"] == 0
        assert row["rollout/logprob_gap"] < 1e-5
        assert row["policy/ratio_mean"] == 1.0
    assert sum(row["environment/failed"] for row in metrics) > 0
    shown = read_jsonl(tmp_path / "run/samples/step-1.jsonl")
    failed = [row for row in shown if row["finish"] == "failed"]
    assert all(row["reward"] is None and row["failure"].startswith("environment, step ") for row in failed)
    assert all(turn.keys() >= {"role", "content"} for row in shown for turn in row["turns"])


def test_groups_without_signal_are_replaced(model_folder, tmp_path) -> None:
    learn = {"algorithm": "dapo", "samples_per_prompt": 2}
    metrics = [row for row in train(model_folder, tmp_path / "run", Moody, learn=learn) if row["step"] > 0]
    assert any(row["rollout/refills"] > 0 for row in metrics)
    for row in metrics:
        dropped = sum(value for key, value in row.items() if key.startswith("run/dropped_"))
        assert row["run/samples_trained"] + dropped == row["run/samples"]


def test_too_many_failures_stop_the_run(model_folder, tmp_path) -> None:
    with pytest.raises(RewardError, match="because environment calls failed; observe") as caught:
        train(model_folder, tmp_path / "run", Moody, observe={"max_failed_rewards": 0.01})
    assert "environment, step" in str(caught.value)


def test_reward_functions_may_ask_for_the_turns(model_folder, tmp_path) -> None:
    metrics = train(model_folder, tmp_path / "run", Chance, reward=[seen, {"fn": "environment"}], learn={"steps": 1})
    assert metrics[1]["reward/failed"] == 0
    assert metrics[1]["reward/seen"] > 0
    assert 0 < metrics[1]["reward/environment"] < 3
