"""Samples that add exactly nothing to a gradient have no pass, and the weights are those of a run that passes them all."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.invariants.test_gradient_invariance import WORDS
from trimtab.config.load import config_from_dict
from trimtab.run import loop, update_step
from trimtab.run.inputs import Inputs
from trimtab.run.session import open_session


def constant_for(*prompts: str) -> Any:
    """A reward that is 1 for every completion of these prompts, and differs between those of the others."""

    def reward(completions: list[str], prompts_: tuple[str, ...] = prompts, **columns: Any) -> list[float]:
        found = [len(set(c)) / 10 + c.count("a") for c in completions]
        return [1.0 if p in prompts_ else r for p, r in zip(columns["prompts"], found)]

    return reward


def train(
    folder: Path,
    tmp_path: Path,
    reward: Any,
    learn: dict[str, Any] | None = None,
    steps: int = 1,
    dtype: str = "float64",
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], list[int]]:
    """Weights after some steps, their metrics, and how many samples each pass was given."""
    tree: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"train": "object:rows"},
        "reward": [{"fn": "object:reward"}],
        "learn": {
            "prompts_per_step": 5, "samples_per_prompt": 3, "max_new_tokens": 8, "seed": 3, "lr": 1e-3,
            "sampling": {"stop_token_ids": list(range(3, 20))}, "optimizer": {"weight_decay": 0.1, "eps": 1e-3}, **(learn or {}),
        },
        "run": {"device": "cpu", "token_budget": 64},
        "observe": {"dir": str(tmp_path / str(len(list(tmp_path.iterdir())))), "tensorboard": False},
    }  # fmt: skip
    inputs = Inputs(train_rows=[{"prompt": word} for word in WORDS], base_dir=tmp_path, rewards={"reward": reward})
    with ExitStack() as stack:
        session = open_session(config_from_dict(tree), inputs, stack)
        given: list[int] = []
        accumulate = session.trainer.accumulate

        def counted(samples: Any, *rest: Any, **named: Any) -> Any:
            given.append(len(samples))
            return accumulate(samples, *rest, **named)

        session.trainer.accumulate = counted  # type: ignore[method-assign]
        metrics = []
        for _ in range(steps):
            metrics.append(loop.update(session, session.buffer.next(session).groups))
            session.state.step += 1
        policy = session.trainer.updater.policy
        return {n: p.detach().clone() for n, p in policy.model.named_parameters()}, metrics, given


@pytest.mark.parametrize(
    "learn",
    [{}, {"algorithm": "dapo", "dynamic_sampling": {"enabled": False}}, {"algorithm": "gspo", "updates_per_step": 2},
     {"algorithm": "rloo"}, {"importance": {"level": "sequence"}}],
    ids=str,
)  # fmt: skip
def test_the_weights_are_those_of_a_run_that_passes_every_sample(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learn: dict[str, Any]
) -> None:
    reward = constant_for(*WORDS[:3])
    weights, metrics, given = train(model_folder, tmp_path, reward, learn)
    assert sum(given) == 6 and metrics[0]["run/samples_without_gradient"] == 9
    assert metrics[0]["run/samples_trained"] == 15, "they are trained on: their share of the denominators counts"
    monkeypatch.setattr(update_step, "with_gradient", lambda samples, learn: samples)
    expected, all_metrics, everything = train(model_folder, tmp_path, reward, learn)
    assert sum(everything) == 15 and all_metrics[0]["run/samples_without_gradient"] == 0
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    assert metrics[0]["policy/loss"] == pytest.approx(all_metrics[0]["policy/loss"], abs=1e-12)


def test_a_step_without_any_gradient_still_moves_by_its_moments(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's moments and weight decay change the weights in a step whose gradient is 0."""

    def first_step_only() -> Any:
        scored = [0]

        def reward(completions: list[str], **_: Any) -> list[float]:
            scored[0] += len(completions)
            return [len(set(c)) / 10 if scored[0] <= 15 else 1.0 for c in completions]

        return reward

    one, _, _ = train(model_folder, tmp_path, first_step_only())
    two, metrics, given = train(model_folder, tmp_path, first_step_only(), steps=2)
    assert metrics[1]["reward/std"] == 0 and given[-1] == 1
    assert any(not torch.equal(one[name], two[name]) for name in one)
    monkeypatch.setattr(update_step, "with_gradient", lambda samples, learn: samples)
    expected, _, given = train(model_folder, tmp_path, first_step_only(), steps=2)
    assert given[-1] == 15
    for name, weight in expected.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("learn", [{"kl": {"coef": 0.1}}, {"entropy_coef": 0.01}], ids=str)
def test_a_term_beside_the_policys_own_gives_every_sample_a_gradient(
    model_folder: Path, tmp_path: Path, learn: dict[str, Any]
) -> None:
    _, metrics, given = train(model_folder, tmp_path, constant_for(*WORDS[:3]), learn)
    assert sum(given) == 15 and metrics[0]["run/samples_without_gradient"] == 0


def test_the_critic_learns_from_every_sample(model_folder: Path, tmp_path: Path) -> None:
    _, _, given = train(model_folder, tmp_path, constant_for(*WORDS), {"algorithm": "ppo"})
    assert given == [15, 15], "GAE's advantages are not 0 where rewards are equal"
