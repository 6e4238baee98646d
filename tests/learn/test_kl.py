from __future__ import annotations

import json
import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from trimtab.config.learn import KL
from trimtab.learn.kl import ESTIMATORS, AdaptiveKL, FixedKL, corrected, k1, k2, k3, kl_controller


def test_the_registry_has_every_name_the_config_offers():
    assert set(ESTIMATORS) == set(get_args(KL.model_fields["estimator"].annotation))


def test_estimators_by_hand():
    # pi 0.5 and 0.2, ref 0.25 and 0.4: d = log 2 and -log 2.
    logp, ref = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.4]).log()
    d = math.log(2)
    assert_close(k1(logp, ref), torch.tensor([d, -d]))
    assert_close(k2(logp, ref), torch.tensor([d * d / 2, d * d / 2]))
    # exp(-d) + d - 1 = 1/2 + log 2 - 1   and   2 - log 2 - 1
    assert_close(k3(logp, ref), torch.tensor([d - 0.5, 1 - d]))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_gradients_equal_finite_differences(name: str):
    logp = -torch.rand(6, dtype=torch.float64).requires_grad_()
    ref = -torch.rand(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: ESTIMATORS[name](x, ref), (logp,))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str):
    policy = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    exact = (policy * (policy / ref).log()).sum()
    assert_close((policy * ESTIMATORS[name](policy.log(), ref.log())).sum(), exact)


def test_gradients_on_average_are_nothing_for_k1_and_the_kl_for_k2():
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    policy = logp.exp()
    (exact,) = torch.autograd.grad((policy * (logp - ref)).sum(), logits, retain_graph=True)

    def average(estimator):
        return torch.autograd.grad((policy.detach() * estimator(logp, ref)).sum(), logits, retain_graph=True)[0]

    assert_close(average(k1), torch.zeros(3, dtype=torch.float64))
    assert_close(average(k2), exact)
    assert exact.abs().max() > 0.1


@pytest.mark.parametrize("name", ESTIMATORS)
def test_corrected_the_gradient_is_that_of_the_kl_whoever_drew_the_tokens(name: str):
    """Averaged exactly over what another policy draws."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    old = torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64)
    logp = logits.log_softmax(0)
    kl = (logp.exp() * (logp - ref)).sum()
    found = (old * corrected(name, logp, ref, old.log())).sum()
    if name != "k2":  # whose value is biased
        assert_close(found, kl)
    assert_close(*(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, kl)))
    (plain,) = torch.autograd.grad((old * ESTIMATORS[name](logp, ref)).sum(), logits, retain_graph=True)
    assert (plain - torch.autograd.grad(kl, logits)[0]).abs().max() > 0.05


def test_corrected_by_sequence_multiplies_by_the_geometric_mean_of_the_ratios():
    """As TRL does where its loss has one ratio a sequence: the gradient goes through the ratio to every token of the sequence."""
    generator = torch.Generator().manual_seed(0)
    logp, ref, old = (-torch.rand(5, dtype=torch.float64, generator=generator) for _ in range(3))
    logp.requires_grad_()
    sequence = torch.tensor([0, 0, 1, 1, 1])
    found = corrected("k3", logp, ref, old, by_sequence=True, sequence=sequence, sequences=2)
    first, second = (logp - old)[:2].mean().exp(), (logp - old)[2:].mean().exp()
    plain = k3(logp, ref) * torch.stack([first, first, second, second, second])
    assert_close(found, plain)
    weights = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5], dtype=torch.float64)
    assert_close(
        *(torch.autograd.grad((weights * value).sum(), logp, retain_graph=True)[0] for value in (found, plain))
    )
    by_token = corrected("k3", logp, ref, old)
    assert (by_token - found).abs().max() > 0.005


def test_corrected_stays_finite_however_far_the_policy_has_gone():
    logp = torch.tensor([-1.0, -400.0], requires_grad=True)
    value = corrected("k3", logp, torch.tensor([-300.0, -1.0]), torch.tensor([-500.0, -1.0]))
    value.sum().backward()
    assert value.isfinite().all() and logp.grad.isfinite().all()


@settings(deadline=None)
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative(logp: float, ref: float):
    pair = torch.tensor([logp]), torch.tensor([ref])
    assert k2(*pair) >= 0
    assert k3(*pair) >= 0


def test_k3_stays_finite_and_keeps_precision():
    logp = torch.tensor([-200.0], requires_grad=True)
    value = k3(logp, torch.tensor([-1.0]))
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logp.grad).all()
    # d = 1e-3: k3 is d^2 / 2 to leading order; exp(-d) + d - 1 in float32 would lose it to cancellation.
    assert_close(k3(torch.tensor([1e-3]), torch.tensor([0.0])), torch.tensor([4.998334e-07]), rtol=2e-3, atol=0)


def test_a_fixed_controller_does_not_move():
    assert kl_controller(0.1, None, 100).update(kl=50.0, samples=1000) == FixedKL(0.1)


@pytest.mark.parametrize(
    ("kl", "samples", "expected"),
    [
        (6.6, 100, 0.101),  # error 6.6 / 6 - 1 = 0.1;          0.1 * (1 + 0.1 * 100 / 1000)
        (60.0, 100, 0.102),  # error 9, cut to 0.2;             0.1 * (1 + 0.2 * 0.1)
        (0.0, 100, 0.098),  # error -1, cut to -0.2;            0.1 * (1 - 0.2 * 0.1)
        (-3.0, 100, 0.098),  # k1 can be negative
        (6.0, 100, 0.1),  # on target
        (60.0, 50_000, 0.12),  # a step larger than the horizon: one full correction
        (0.0, 50_000, 0.08),  # 0.1 * (1 - 0.2 * 50) would be negative
    ],
)
def test_the_adaptive_controller_by_hand(kl: float, samples: int, expected: float):
    controller = kl_controller(0.1, target=6.0, horizon=1000)
    assert isinstance(controller, AdaptiveKL)
    assert controller.update(kl, samples).coef == pytest.approx(expected)
    assert controller.coef == 0.1


def test_the_adaptive_controller_resumes_from_its_coefficient():
    steps = [3.0, 9.0, 7.0, 1.0]
    whole = kl_controller(0.1, 6.0, 1000)
    for kl in steps:
        whole = whole.update(kl, 64)
    first = kl_controller(0.1, 6.0, 1000).update(steps[0], 64).update(steps[1], 64)
    second = kl_controller(json.loads(json.dumps(first.coef)), 6.0, 1000)
    assert second.update(steps[2], 64).update(steps[3], 64) == whole


def test_a_kl_that_is_not_a_number_is_not_taken_for_a_large_one():
    with pytest.raises(AssertionError, match="nan"):
        AdaptiveKL(0.1, 6.0, 1000).update(float("nan"), 10)
