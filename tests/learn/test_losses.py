from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from trimtab.config.learn import LossName
from trimtab.learn.aggregate import token_weights
from trimtab.learn.losses import LOSSES, cispo_loss, clip_loss, gspo_loss, on_policy_loss, sequence_clip_loss

F64 = torch.float64


def from_ratios(ratios: list[float], logp: float = -1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """logp (with gradient) and old_logp whose ratios are these."""
    ours = torch.full((len(ratios),), logp, dtype=F64)
    return ours.clone().requires_grad_(), ours - torch.tensor(ratios, dtype=F64).log()


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def gradient(loss: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss.sum(), logp)[0]


def test_the_registry_has_every_name_the_config_offers():
    assert set(LOSSES) == set(get_args(LossName))


# --- clip


def test_clip_by_hand_in_all_regions():
    # low 0.2, high 0.3: the ratio is kept in [0.8, 1.3].
    #   r     A   r A    clip(r) A   min     so
    #   1.5   2   3.0    2.6         2.6     clipped: already raised enough
    #   0.5   2   1.0    1.6         1.0     free: it must still be raised
    #   1.1   2   2.2    2.2         2.2     free
    #   1.5  -2  -3.0   -2.6        -3.0     free: it must be lowered again
    #   0.5  -2  -1.0   -1.6        -1.6     clipped: already lowered enough
    #   0.9  -2  -1.8   -1.8        -1.8     free
    ratios = [1.5, 0.5, 1.1, 1.5, 0.5, 0.9]
    logp, old = from_ratios(ratios)
    result = clip_loss(logp, old, tensor([2, 2, 2, -2, -2, -2]), 0.2, 0.3)
    assert_close(result.loss, tensor([-2.6, -1.0, -2.2, 3.0, 1.6, 1.8]))
    assert result.clipped.tolist() == [True, False, False, False, True, False]
    assert_close(result.ratio, tensor(ratios))
    # d(-r A) / d logp = -r A where free, 0 where clipped
    assert_close(gradient(result.loss, logp), tensor([0, -1.0, -2.2, 3.0, 0, 1.8]))


def test_on_policy_the_clip_loss_has_the_policy_gradient():
    logp = tensor([-1.0, -2.0]).requires_grad_()
    result = clip_loss(logp, logp.detach(), tensor([3.0, -4.0]), 0.2, 0.2)
    assert_close(gradient(result.loss, logp), tensor([-3.0, 4.0]))
    assert not result.clipped.any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_on_the_bound_keeps_its_whole_gradient(advantage: float):
    # exp(0) is exactly 1, so low = high = 0 puts the ratio on both bounds.
    logp = tensor([-1.0]).requires_grad_()
    result = clip_loss(logp, logp.detach(), tensor([advantage]), 0.0, 0.0)
    assert not result.clipped.any()
    assert_close(gradient(result.loss, logp), tensor([-advantage]))


def test_dual_clip_by_hand():
    # low = high = 0.2, dual 3.
    #   r     A    min(r A, clip A)   floor 3 A   objective
    #   5    -2    -10                -6          -6      the floor binds
    #   2    -2    -4                 -6          -4      free
    #   0.5  -2    -1.6               -6          -1.6    clipped from below, the floor is far
    #   5     2     2.4               no floor     2.4    clipped from above; the floor is for negative advantages
    #   0.5   2     1.0               no floor     1.0    free
    logp, old = from_ratios([5, 2, 0.5, 5, 0.5])
    result = clip_loss(logp, old, tensor([-2, -2, -2, 2, 2]), 0.2, 0.2, dual=3.0)
    assert_close(result.loss, tensor([6.0, 4.0, 1.6, -2.4, -1.0]))
    assert result.clipped.tolist() == [True, False, True, True, False]
    assert_close(gradient(result.loss, logp), tensor([0, 4.0, 0, 0, -1.0]))


def test_without_dual_clip_a_negative_advantage_is_not_bounded():
    logp, old = from_ratios([50.0])
    assert_close(clip_loss(logp, old, tensor([-2]), 0.2, 0.2).loss, tensor([100.0]))


@settings(deadline=None, max_examples=100)
@given(
    st.floats(0.05, 20),
    st.floats(-5, 5),
    st.floats(0, 0.9),
    st.floats(0, 3),
    st.none() | st.floats(1.01, 10),
)
def test_clip_equals_the_formula(ratio: float, advantage: float, low: float, high: float, dual: float | None):
    logp, old = from_ratios([ratio])
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    result = clip_loss(logp, old, tensor([advantage]), low, high, dual)
    assert_close(result.loss, tensor([-objective]))
    slope = 0.0 if result.clipped.item() else -ratio * advantage
    assert_close(gradient(result.loss, logp), tensor([slope]))


@pytest.mark.parametrize("dual", [None, 2.0])
def test_clip_gradients_equal_finite_differences(dual: float | None):
    logp, old = from_ratios([0.3, 0.7, 0.95, 1.05, 1.6, 2.7, 0.3, 0.7, 0.95, 1.05, 1.6, 2.7])
    advantages = tensor([1.5] * 6 + [-0.5] * 6)
    assert torch.autograd.gradcheck(lambda x: clip_loss(x, old, advantages, 0.2, 0.28, dual).loss, (logp,))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [300.0, -300.0])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_ratios_beyond_float_range_give_finite_losses_and_gradients(name: str, gap: float, advantage: float):
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    result = LOSSES[name](
        logp, logp.detach() - gap, torch.full((2,), advantage), 0.2, 0.2, sequence=torch.tensor([0, 0]), sequences=1
    )
    assert torch.isfinite(result.loss).all()
    assert torch.isfinite(gradient(result.loss, logp)).all()


# --- gspo


def test_gspo_by_hand():
    # Sequence 0 (tokens 0, 2): log ratios 0.2, 0.4: s = e^0.3 = 1.35, A = 2:  above 1.1, clipped, loss -2.2
    # Sequence 1 (token 1):     log ratio 0.05:       s = e^0.05 = 1.051, A = -1: free, loss 1.051
    logp = tensor([-1.0, -1.0, -1.0]).requires_grad_()
    old = tensor([-1.2, -1.05, -1.4])
    result = gspo_loss(logp, old, tensor([2, -1, 2]), 0.1, 0.1, sequence=torch.tensor([0, 1, 0]), sequences=2)
    s0, s1 = math.exp(0.3), math.exp(0.05)
    assert_close(result.ratio, tensor([s0, s1, s0]))
    assert_close(result.loss, tensor([-2.2, s1, -2.2]))
    assert result.clipped.tolist() == [True, False, True]
    assert_close(gradient(result.loss, logp), tensor([0, s1, 0]))


def sequence_level_objective(
    logp: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    lengths: list[int],
    low: float,
    high: float,
    dual: float | None,
) -> torch.Tensor:
    """GSPO as the paper states it: a mean over sequences, plain autograd through s, nothing stopped."""
    losses = []
    for ours, theirs, advantage in zip(logp.split(lengths), old.split(lengths), advantages):
        s = (ours - theirs).mean().exp()
        objective = torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage)
        if dual is not None and advantage < 0:
            objective = torch.maximum(objective, dual * advantage)
        losses.append(-objective)
    return torch.stack(losses).mean()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.integers(0, 2**31),
    st.sampled_from([None, 1.3]),
)
def test_gspo_has_the_value_and_gradient_of_the_sequence_level_objective(
    lengths: list[int], seed: int, dual: float | None
):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    logp = -torch.rand(tokens, dtype=F64, generator=generator).requires_grad_()
    old = logp.detach() + 0.6 * torch.randn(tokens, dtype=F64, generator=generator)
    advantages = torch.randn(len(lengths), dtype=F64, generator=generator)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    result = gspo_loss(logp, old, advantages[sequence], 0.1, 0.15, dual, sequence=sequence, sequences=len(lengths))
    weights = token_weights(torch.tensor(lengths), "sequence_mean", 7).double()[sequence]
    ours = (weights * result.loss).sum()
    plain = sequence_level_objective(logp, old, advantages, lengths, 0.1, 0.15, dual)
    assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    assert_close(torch.autograd.grad(ours, logp)[0], torch.autograd.grad(plain, logp)[0], rtol=1e-6, atol=1e-7)


def test_gspo_gradients_equal_finite_differences():
    # A token's own loss depends on its neighbours through s, which the straight-through form assigns to the neighbours'
    # losses instead; the mean over each sequence is where the two agree.
    lengths = torch.tensor([3, 1, 4])
    sequence = torch.arange(3).repeat_interleave(lengths)
    logp = -torch.rand(8, dtype=F64).requires_grad_()
    old = logp.detach() + 0.3 * torch.randn(8, dtype=F64)
    advantages = tensor([1.0, -2.0, 0.5])[sequence]
    weights = 1 / (3.0 * lengths.double())[sequence]

    def step_loss(x: torch.Tensor) -> torch.Tensor:
        return (weights * gspo_loss(x, old, advantages, 0.3, 0.3, sequence=sequence, sequences=3).loss).sum()

    assert torch.autograd.gradcheck(step_loss, (logp,))


def test_gspo_equals_clip_for_sequences_of_one_token():
    logp, old = from_ratios([1.5, 0.5, 1.1, 3.0])
    advantages = tensor([1, 1, -1, -2])
    by_token = clip_loss(logp, old, advantages, 0.2, 0.2, 2.0)
    by_sequence = gspo_loss(logp, old, advantages, 0.2, 0.2, 2.0, sequence=torch.arange(4), sequences=4)
    assert_close(by_sequence.loss, by_token.loss)
    assert torch.equal(by_sequence.clipped, by_token.clipped)
    assert_close(gradient(by_sequence.loss, logp), gradient(by_token.loss, logp))


def test_gspo_does_not_need_sequences_side_by_side():
    logp = -torch.rand(6, dtype=F64)
    old, advantages = logp + 0.3 * torch.randn(6, dtype=F64), torch.randn(3, dtype=F64)
    sequence = torch.tensor([0, 0, 1, 1, 1, 2])
    shuffle = torch.tensor([4, 0, 5, 2, 1, 3])
    straight = gspo_loss(logp, old, advantages[sequence], 0.1, 0.1, sequence=sequence, sequences=3)
    mixed = gspo_loss(
        logp[shuffle],
        old[shuffle],
        advantages[sequence[shuffle]],
        0.1,
        0.1,
        sequence=sequence[shuffle],
        sequences=3,
    )
    assert_close(mixed.loss, straight.loss[shuffle])


def test_gspo_asks_for_the_sequences():
    with pytest.raises(AssertionError, match="sequence"):
        gspo_loss(torch.zeros(1), torch.zeros(1), torch.ones(1), 0.1, 0.1)


# --- sequence_clip


def test_sequence_clip_by_hand():
    # Sequence 0 (tokens 0, 2): log ratios 0.2, 0.4: R = e^0.6 = 1.82, A = 2:  above 1.1, clipped, objective 2.2, half a token
    # Sequence 1 (token 1):     log ratio 0.05:       R = e^0.05 = 1.051, A = -1: free, objective -1.051
    logp = tensor([-1.0, -1.0, -1.0]).requires_grad_()
    old = tensor([-1.2, -1.05, -1.4])
    result = sequence_clip_loss(logp, old, tensor([2, -1, 2]), 0.1, 0.1, sequence=torch.tensor([0, 1, 0]), sequences=2)
    whole, one = math.exp(0.6), math.exp(0.05)
    assert_close(result.ratio, tensor([whole, one, whole]))
    assert_close(result.loss, tensor([-1.1, one, -1.1]))
    assert result.clipped.tolist() == [True, False, True]
    assert_close(gradient(result.loss, logp), tensor([0, one, 0]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 2**31))
def test_sequence_clip_has_the_value_and_gradient_of_one_action_a_sequence(lengths: list[int], seed: int):
    """RLOO as TRL writes it: a mean over sequences, plain autograd through the ratio of a whole completion."""
    generator = torch.Generator().manual_seed(seed)
    logp = -torch.rand(sum(lengths), dtype=F64, generator=generator).requires_grad_()
    old = logp.detach() + 0.2 * torch.randn(sum(lengths), dtype=F64, generator=generator)
    advantages = torch.randn(len(lengths), dtype=F64, generator=generator)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))

    result = sequence_clip_loss(logp, old, advantages[sequence], 0.2, 0.25, sequence=sequence, sequences=len(lengths))
    weights = token_weights(torch.tensor(lengths), "sequence_sum", 7).double()[sequence]
    ours = (weights * result.loss).sum()
    ratio = torch.stack([(a - b).sum().exp() for a, b in zip(logp.split(lengths), old.split(lengths))])
    plain = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.25) * advantages).mean()
    assert_close(ours, plain, rtol=1e-6, atol=1e-7)
    assert_close(torch.autograd.grad(ours, logp)[0], torch.autograd.grad(plain, logp)[0], rtol=1e-6, atol=1e-7)


def test_sequence_clip_equals_clip_for_sequences_of_one_token():
    logp, old = from_ratios([1.5, 0.5, 1.1, 3.0])
    advantages = tensor([1, 1, -1, -2])
    by_token = clip_loss(logp, old, advantages, 0.2, 0.2)
    by_sequence = sequence_clip_loss(logp, old, advantages, 0.2, 0.2, sequence=torch.arange(4), sequences=4)
    assert_close(by_sequence.loss, by_token.loss)
    assert_close(gradient(by_sequence.loss, logp), gradient(by_token.loss, logp))


# --- cispo


def test_cispo_by_hand():
    # low 1 (no lower bound), high 1: weight min(r, 2). log pi = -0.5.
    #   r    A   weight  loss = -weight A log pi    gradient = -weight A
    #   3    2   2       2                          -4   clipped, and it still learns
    #   0.1  2   0.1     0.1                        -0.2
    #   3   -2   2      -2                           4   the bound holds for both signs
    logp, old = from_ratios([3.0, 0.1, 3.0], logp=-0.5)
    result = cispo_loss(logp, old, tensor([2, 2, -2]), 1.0, 1.0)
    assert_close(result.loss, tensor([2.0, 0.1, -2.0]))
    assert result.clipped.tolist() == [True, False, True]
    assert_close(result.ratio, tensor([3.0, 0.1, 3.0]))
    assert_close(gradient(result.loss, logp), tensor([-4.0, -0.2, 4.0]))


def test_cispo_has_a_lower_bound_when_asked():
    logp, old = from_ratios([0.5])
    result = cispo_loss(logp, old, tensor([1]), 0.2, 0.2)
    assert result.clipped.tolist() == [True]
    assert_close(gradient(result.loss, logp), tensor([-0.8]))


# --- on_policy


def test_on_policy_by_hand():
    logp, old = from_ratios([4.0, 0.25], logp=-0.5)
    result = on_policy_loss(logp, old, tensor([3, -2]), 0.2, 0.2)
    assert_close(result.loss, tensor([1.5, -1.0]))
    assert_close(gradient(result.loss, logp), tensor([-3.0, 2.0]))
    assert_close(result.ratio, tensor([4.0, 0.25]))
    assert not result.clipped.any()


def test_on_policy_gradients_equal_finite_differences():
    logp, old = from_ratios([4.0, 0.25, 1.0])
    assert torch.autograd.gradcheck(lambda x: on_policy_loss(x, old, tensor([3, -2, 1]), 0.2, 0.2).loss, (logp,))


# --- all


@pytest.mark.parametrize("name", LOSSES)
def test_all_losses_share_the_gradient_of_an_on_policy_step(name: str):
    # At ratio 1 every one of them is the policy gradient: -A per token.
    logp = tensor([-1.0, -2.0, -0.1]).requires_grad_()
    advantages = tensor([2.0, 2.0, -1.0])
    result = LOSSES[name](
        logp, logp.detach(), advantages, 0.2, 0.2, None, sequence=torch.tensor([0, 0, 1]), sequences=2
    )
    assert_close(gradient(result.loss, logp), -advantages)
    assert not result.ratio.requires_grad
    assert not result.clipped.any()


@pytest.mark.parametrize("name", ["sequence_clip", "cispo", "on_policy"])
def test_dual_clip_is_refused_where_it_would_have_no_effect(name: str):
    with pytest.raises(AssertionError, match="dual"):
        LOSSES[name](
            torch.zeros(1), torch.zeros(1), torch.ones(1), 0.2, 0.2, 3.0, sequence=torch.tensor([0]), sequences=1
        )
