"""Whole runs with moments of 8 bits: they resume exactly, with adapters and from host memory too, and learn as others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.run.test_loop import adapted, train
from trimtab import demo
from trimtab.base.errors import ConfigError
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.data.tasks import TASKS
from trimtab.model.policy import Policy
from trimtab.update.objectives.likelihood import Likelihood
from trimtab.update.updater import Updater

SMALL = {"optimizer": {"states": "8bit"}}


def test_a_resumed_run_ends_with_the_same_weights(model_folder: Path, tmp_path: Path) -> None:
    """With float32 masters, and all of it in host memory."""
    model = {"path": str(model_folder), "dtype": "bfloat16"}
    settings: dict[str, Any] = {"observe": {"checkpoint_every": 1}, "run": {"offload": {"optimizer": True}}}
    whole, _ = train(model, tmp_path / "whole", learn={"steps": 2, **SMALL}, **settings)
    half, _ = train(model, tmp_path / "half", learn={"steps": 1, **SMALL}, **settings)
    saved = load_file(half / "checkpoints/step-1/optimizer.safetensors")
    kinds = {key.partition("/")[0]: value.dtype for key, value in saved.items()}
    assert kinds["exp_avg_codes"] == kinds["exp_avg_sq_codes"] == torch.uint8
    assert kinds["exp_avg_scales"] == kinds["master"] == torch.float32 and "exp_avg" not in kinds
    with pytest.raises(ConfigError, match="step-1 cannot continue with another type of optimizer state"):
        train(model, tmp_path / "half", learn={"steps": 2}, **settings, resume=True)
    train(model, tmp_path / "half", learn={"steps": 2, **SMALL}, **settings, resume=True)
    one, two = (load_file(f / "final/model.safetensors") for f in (whole, half))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_adapters_have_them_too(model_folder: Path, tmp_path: Path) -> None:
    folder, metrics = train(adapted(model_folder), tmp_path, learn={"steps": 1, **SMALL})
    saved = load_file(folder / "checkpoints/step-1/optimizer.safetensors")
    assert all(key.endswith("/adapters") for key in saved) and any(key.startswith("exp_avg_codes/") for key in saved)
    assert metrics[1]["policy/grad_norm"] > 0


def supervised(states: str, budget: int = 4096, steps: int = 24) -> tuple[list[float], torch.Tensor, torch.Tensor]:
    """Losses of the demo's supervised steps, and its weights before and after, in one row."""
    tokenizer = demo.build_tokenizer()
    policy = Policy(demo.build_model(tokenizer, 0))
    before = torch.cat([p.detach().flatten().clone() for p in policy.model.parameters()])
    settings = Learn(loss="on_policy", aggregate="token_mean", optimizer={"states": states})
    sizes = {"token_budget": budget, "score_token_budget": budget, "logprob_chunk": budget}
    updater = Updater(policy, Likelihood(), resolve(settings), **sizes, checkpoint_activations=False)
    rows = TASKS[demo.TASK].generate(512, 4, 0, "train")
    losses = []
    for step in range(steps):
        samples = demo.supervised_batch(tokenizer, rows[(step * 32) % 480 :][:32])
        losses.append(float(updater.step(samples, 2e-3 * min(1.0, (step + 1) / 10), 0.0).sums["loss"]))
    return losses, before, torch.cat([p.detach().flatten() for p in policy.model.parameters()])


@pytest.mark.slow
def test_the_curve_is_near_that_of_full_moments_and_is_not_the_same() -> None:
    """Within 2 % of the loss over 24 steps. (Later curves part as those of two learning rates 3 % apart do:
    bench/eight_bit.py.) The weights are more than 1 % of the way apart, a hundred times what the order of float sums makes: so
    this is a choice of `learn`."""
    full, start, there = supervised("full")
    _, _, other = supervised("full", budget=256)
    small, _, found = supervised("8bit")
    assert full[0] == pytest.approx(small[0], rel=1e-6) and full[-1] < 0.5 * full[0]
    assert small == pytest.approx(full, rel=0.02)
    way = float((there - start).norm())
    apart, reordered = (float((weights - there).norm()) / way for weights in (found, other))
    assert 0.01 < apart < 0.2
    assert reordered < 0.01 * apart
