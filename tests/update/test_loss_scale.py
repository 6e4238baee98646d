"""float16: the scale of the loss saves small gradients and changes nothing else, and one that is too large is lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model

from tests.update.test_updater import samples
from tests.update.test_without_gradient import constant_for, train
from trimtab.base.errors import ConfigError
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.config.load import config_from_dict
from trimtab.config.run import Run
from trimtab.config.schema import Model
from trimtab.model import load
from trimtab.model.policy import Policy
from trimtab.run.assemble_ranks import on_one_device
from trimtab.update import loss_scale, updater
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater


def gradients(dtype: torch.dtype, factor: float = 1.0, **settings: Any) -> list[torch.Tensor]:
    """Of a step whose weights in the loss are multiplied by `factor`, divided by it again."""
    learn = resolve(Learn())
    settings = {"token_budget": 200, "checkpoint_activations": False} | settings
    made = Updater(
        Policy(tiny_model("llama", dtype)),
        PolicyGradient(learn),
        learn,
        score_token_budget=200,
        logprob_chunk=16,
        **settings,
    )
    batch = samples()
    for sample in batch:
        sample.weights = sample.weights * factor
    made.accumulate(batch)
    return [gradient.double() / factor for gradient in made.optimizer.grads() if gradient is not None]


def off(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """Of the norm of all."""
    wrong = sum(float((one - other).square().sum()) for one, other in zip(found, right, strict=True))
    return (wrong / sum(float(x.square().sum()) for x in right)) ** 0.5


@pytest.fixture
def grads_seen(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scales at which gradients were looked at."""
    scales: list[float] = []

    def seen(found: Any, scale: float) -> bool:
        scales.append(scale)
        return loss_scale.unscale(found, scale)

    monkeypatch.setattr(updater, "unscale", seen)
    return scales


def weights_of(folder: Path, tmp_path: Path, first: float, monkeypatch: pytest.MonkeyPatch, **learn: Any) -> Any:
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", first)
    return train(folder, tmp_path, constant_for(), {"max_grad_norm": None, **learn}, dtype="float16")


def test_a_scale_that_is_too_large_is_lowered_and_the_step_is_the_same(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grads_seen: list[float]
) -> None:
    """From 2^40, where everything overflows, to where nothing does. The weights are those of a step that began there."""
    one, metrics, _ = weights_of(model_folder, tmp_path, 2.0**40, monkeypatch)
    assert grads_seen[0] == 2.0**40 and len(grads_seen) > 3
    last = grads_seen[-1]
    assert metrics[0]["run/loss_scale"] == last and metrics[0]["run/skipped_updates"] == 0
    two, again, _ = weights_of(model_folder, tmp_path, last, monkeypatch)
    assert again[0]["run/loss_scale"] == last
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_scale_saves_gradients_that_float16_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gradients(torch.float32)
    assert off(gradients(torch.float16), exact) < 0.02
    assert off(gradients(torch.float16, factor=1e-4), exact) < 0.02
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 1.0)
    assert off(gradients(torch.float16, factor=1e-4), exact) > 0.1, (
        "the planted error is seen: without a scale they are lost"
    )


def test_the_balancing_loss_of_a_mixture_is_scaled_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[torch.Tensor]:
        learn = resolve(Learn(router_aux_coef=0.5))
        policy = Policy(tiny_model("qwen3_moe", torch.float64))
        made = Updater(
            policy, PolicyGradient(learn), learn, token_budget=200, score_token_budget=200, logprob_chunk=16,
            checkpoint_activations=False,
        )  # fmt: skip
        made.accumulate(samples())
        return [gradient.clone() for gradient in made.optimizer.grads() if gradient is not None]

    right = found()
    monkeypatch.setattr(updater, "first_scale", lambda dtype: 2.0**10)
    assert off(found(), right) < 1e-6
    monkeypatch.setattr(updater.MixtureLoss, "of", without_scale(updater.MixtureLoss.of))
    assert off(found(), right) > 1e-3, "the planted error is seen: a balancing loss that is not scaled is lost"


def without_scale(of: Any) -> Any:
    return lambda self, batch, share, filler, scale=1.0: of(self, batch, share, filler)


@pytest.mark.parametrize("settings", [{"token_budget": 30}, {"checkpoint_activations": True}], ids=str)
def test_law_1_holds_in_float16(settings: dict[str, Any]) -> None:
    assert off(gradients(torch.float16, **settings), gradients(torch.float16)) < 0.01, "half precision, three digits"


def test_a_gpu_without_bfloat16_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    assert load.resolve_dtype(Model(path="x"), device) == torch.float16
    with pytest.raises(ConfigError, match=r"Tesla T4 \(sm_75\).*Write float16"):
        load.refuse_dtype(Model(path="x", dtype="bfloat16"), device)
    load.refuse_dtype(Model(path="x", dtype="float16"), device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert load.resolve_dtype(Model(path="x"), device) == torch.bfloat16


def test_a_plan_in_float16_is_for_one_device() -> None:
    """Also where the type is the GPU's own choice, which a config alone does not say."""
    assert on_one_device(Run()).devices == 1
    for run in (Run(devices=2), Run(placement={"actor": 1, "rollout": 1})):
        with pytest.raises(ConfigError, match=r"float16 is trained on one device"):
            on_one_device(run)


def test_several_devices_are_refused() -> None:
    tree = {"model": {"path": "x", "dtype": "float16"}, "data": {"train": "x.jsonl"}, "reward": [{"fn": "length"}]}
    with pytest.raises(ConfigError, match=r"one device.*run\.devices: 1"):
        config_from_dict(tree | {"run": {"devices": 2}})
