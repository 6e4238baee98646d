from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from trimtab.config.learn import AdvantageName
from trimtab.learn.advantages import (
    ADVANTAGES,
    EPS,
    batch_mean,
    gae,
    global_norm,
    group_mean,
    group_mean_batch_std,
    group_mean_global_norm,
    group_mean_global_std,
    group_std,
    has_signal,
    leave_one_out,
    normalised,
    returns,
)

# Two interleaved groups: {1, 2, 6} with mean 3 and {0, 4} with mean 2; the step's mean is 13 / 5 = 2.6.
REWARDS = torch.tensor([1.0, 0.0, 2.0, 4.0, 6.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 1, 0, 1, 0])


def close(actual: torch.Tensor, expected: list[float]) -> None:
    assert_close(actual, torch.tensor(expected, dtype=actual.dtype))


@st.composite
def samples(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    size = draw(st.integers(1, 24))
    rewards = draw(st.lists(st.floats(-10, 10), min_size=size, max_size=size))
    groups = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)


def test_the_registry_has_every_name_the_config_offers():
    of_tokens = {"gae", "global_norm", "group_mean_global_norm"}
    assert set(ADVANTAGES) == set(get_args(AdvantageName)) - of_tokens


def test_group_mean_by_hand():
    close(group_mean(REWARDS, GROUPS), [1 - 3, 0 - 2, 2 - 3, 4 - 2, 6 - 3])


def test_group_std_by_hand():
    # {1, 2, 6}: (4 + 1 + 9) / (3 - 1) = 7.    {0, 4}: (4 + 4) / (2 - 1) = 8.
    a, b = math.sqrt(7) + 1e-4, math.sqrt(8) + 1e-4
    close(group_std(REWARDS, GROUPS), [-2 / a, -2 / b, -1 / a, 2 / b, 3 / a])


def test_leave_one_out_by_hand():
    # 1 - (2 + 6) / 2 = -3;   0 - 4;   2 - (1 + 6) / 2 = -1.5;   4 - 0;   6 - (1 + 2) / 2 = 4.5
    close(leave_one_out(REWARDS, GROUPS), [-3, -4, -1.5, 4, 4.5])


def test_batch_mean_by_hand():
    close(batch_mean(REWARDS, GROUPS), [-1.6, -2.6, -0.6, 1.4, 3.4])


def test_group_mean_global_std_by_hand():
    # the centred rewards -2, -2, -1, 2, 3 have mean 0; (4 + 4 + 1 + 4 + 9) / (5 - 1) = 5.5
    s = math.sqrt(5.5) + 1e-4
    close(group_mean_global_std(REWARDS, GROUPS), [-2 / s, -2 / s, -1 / s, 2 / s, 3 / s])


def test_group_mean_batch_std_by_hand():
    # the rewards around 2.6: (2.56 + 6.76 + 0.36 + 1.96 + 11.56) / (5 - 1) = 5.8
    s = math.sqrt(5.8) + 1e-4
    close(group_mean_batch_std(REWARDS, GROUPS), [-2 / s, -2 / s, -1 / s, 2 / s, 3 / s])


@pytest.mark.parametrize("name", ["group_std", "group_mean", "leave_one_out"])
def test_a_group_of_one_has_nothing_to_compare_with(name: str):
    # Group 7 has one sample; the numbers in between have none.
    rewards, groups = torch.tensor([5.0, 1.0, 3.0]), torch.tensor([7, 0, 0])
    advantages = ADVANTAGES[name](rewards, groups)
    assert advantages[0] == 0
    assert advantages[1] < 0 < advantages[2]


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name: str, dtype: torch.dtype):
    # 0.1 is not a binary fraction: the plain mean of seven of them is not 0.1.
    rewards = torch.full((7,), 0.1, dtype=dtype)
    advantages = ADVANTAGES[name](rewards, torch.zeros(7, dtype=torch.int64))
    assert advantages.dtype == dtype
    assert torch.equal(advantages, torch.zeros(7, dtype=dtype))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_one_sample_and_no_sample_are_not_nan(name: str):
    assert ADVANTAGES[name](torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]
    assert ADVANTAGES[name](torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


@settings(deadline=None, max_examples=60)
@given(samples())
def test_group_functions_equal_the_same_function_on_each_group_alone(case: tuple[torch.Tensor, torch.Tensor]):
    rewards, groups = case
    standardised, others = group_std(rewards, groups), leave_one_out(rewards, groups)
    for group in groups.unique():
        mine = rewards[groups == group]
        n = len(mine)
        std = mine.std() if n > 1 else 0.0
        assert_close(standardised[groups == group], (mine - mine.mean()) / (std + EPS), rtol=1e-6, atol=1e-8)
        baseline = torch.stack([(mine.sum() - r) / (n - 1) for r in mine]) if n > 1 else mine
        assert_close(others[groups == group], mine - baseline)


@settings(deadline=None, max_examples=60)
@given(samples())
def test_leave_one_out_is_the_group_mean_scaled_by_n_over_n_minus_1(case: tuple[torch.Tensor, torch.Tensor]):
    rewards, groups = case
    size = torch.bincount(groups)[groups].double()
    scale = torch.where(size > 1, size / (size - 1), 0.0)
    assert_close(leave_one_out(rewards, groups), group_mean(rewards, groups) * scale)


@settings(deadline=None, max_examples=60)
@given(samples())
def test_global_functions_do_not_depend_on_how_groups_are_numbered(case: tuple[torch.Tensor, torch.Tensor]):
    rewards, groups = case
    for name, function in ADVANTAGES.items():
        assert_close(function(rewards, groups), function(rewards, 9 - groups), msg=name)
    std = rewards.std() if len(rewards) > 1 else 0.0
    assert_close(batch_mean(rewards, groups), rewards - rewards.mean())
    assert_close(normalised(rewards), (rewards - rewards.mean()) / (std + EPS), rtol=1e-6, atol=1e-8)


def test_has_signal_where_rewards_differ():
    #          group 0: 1, 1   group 1: 0, 0.5   group 2: no sample   group 3: one sample
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.5, 2.0])
    groups = torch.tensor([0, 1, 0, 1, 3])
    assert has_signal(rewards, groups).tolist() == [False, True, False, False]
    assert has_signal(-rewards, groups).tolist() == [False, True, False, False]
    assert has_signal(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_gae_by_hand():
    # Sequence 1: rewards 0, 1; values 2, 4.  gamma 0.5, lam 0.8, so gamma lam = 0.4.
    #   delta_1 = 1 + 0 - 4 = -3            A_1 = -3                    return_1 = 1
    #   delta_0 = 0 + 0.5 * 4 - 2 = 0       A_0 = 0 + 0.4 * -3 = -1.2   return_0 = 0.8
    # Sequence 2: reward 3, value 1:  A = 3 - 1 = 2, return 3; nothing of it reaches sequence 1.
    advantages, returns = gae(
        torch.tensor([0.0, 1.0, 3.0]), torch.tensor([2.0, 4.0, 1.0]), torch.tensor([0, 2, 3]), gamma=0.5, lam=0.8
    )
    close(advantages, [-1.2, -3.0, 2.0])
    close(returns, [0.8, 1.0, 3.0])


def naive_gae(
    rewards: list[float], values: list[float], cu_lengths: list[int], gamma: float, lam: float
) -> list[float]:
    """The definition: A_t = sum over l >= 0 of (gamma lam)^l delta_(t+l), within the sequence."""
    advantages = []
    for start, end in pairwise(cu_lengths):
        for t in range(start, end):
            total = 0.0
            for k in range(t, end):
                following = values[k + 1] if k + 1 < end else 0.0
                total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * following - values[k])
            advantages.append(total)
    return advantages


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_gae_equals_its_definition(lengths: list[int], gamma: float, lam: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), dtype=torch.float64, generator=generator)
    cu_lengths = torch.tensor([0, *lengths]).cumsum(0)
    advantages, returns = gae(rewards, values, cu_lengths, gamma, lam)
    close(advantages, naive_gae(rewards.tolist(), values.tolist(), cu_lengths.tolist(), gamma, lam))
    assert_close(returns, advantages + values)


def test_gae_carries_no_gradient_to_the_values():
    values = torch.ones(2, requires_grad=True)
    advantages, returns = gae(torch.ones(2), values, torch.tensor([0, 2]), 1.0, 0.95)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert values.tolist() == [1.0, 1.0]


def test_gae_refuses_lengths_that_do_not_cover_the_tokens():
    with pytest.raises(AssertionError, match="cu_lengths"):
        gae(torch.ones(3), torch.ones(3), torch.tensor([0, 2]), 1.0, 1.0)


def test_global_norm_by_hand():
    # Penalties 0.1 and 0.2, reward 5: earned -0.1, 5 - 0.2 = 4.8; returns 4.7, 4.8. Penalty 0.3, reward 1: 0.7.
    # mean (4.7 + 4.8 + 0.7) / 3 = 3.4; deviations 1.3, 1.4, -2.7; (1.69 + 1.96 + 7.29) / (3 - 1) = 5.47
    s = math.sqrt(5.47) + 1e-4
    penalty = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    advantages = global_norm(torch.tensor([5.0, 1.0], dtype=torch.float64), penalty, torch.tensor([0, 2, 3]))
    close(advantages, [1.3 / s, 1.4 / s, -2.7 / s])


def test_global_norm_without_a_penalty_repeats_the_reward_over_the_tokens():
    # Rewards over tokens 2, 2, 2, 6: mean 3, deviations -1, -1, -1, 3; 12 / 3 = 4, std 2.
    advantages = global_norm(torch.tensor([2.0, 6.0]), torch.zeros(4), torch.tensor([0, 3, 4]))
    close(advantages, [-1 / (2 + EPS)] * 3 + [3 / (2 + EPS)])


def test_global_norm_of_equal_rewards_is_exactly_zero():
    advantages = global_norm(torch.full((3,), 0.1), torch.zeros(9), torch.tensor([0, 1, 4, 9]))
    assert torch.equal(advantages, torch.zeros(9))


def test_group_mean_global_norm_by_hand():
    # One group of rewards 1 and 5, mean 3: -2 over three tokens and 2 over one. Their mean is -1: deviations -1, -1, -1, 3;
    # 12 / 3 = 4, std 2.
    rewards, groups, offsets = torch.tensor([1.0, 5.0]), torch.tensor([0, 0]), torch.tensor([0, 3, 4])
    advantages = group_mean_global_norm(rewards, groups, torch.zeros(4), offsets)
    close(advantages, [-1 / (2 + EPS)] * 3 + [3 / (2 + EPS)])
    # With a penalty of 1 a token: -5, -4, -3 and 1 are left to be earned; mean -2.75.
    left = torch.tensor([-5.0, -4.0, -3.0, 1.0])
    close(
        group_mean_global_norm(rewards, groups, torch.ones(4), offsets),
        ((left - left.mean()) / (left.std() + EPS)).tolist(),
    )


def test_group_mean_global_norm_of_groups_without_signal_is_exactly_zero():
    rewards, offsets = torch.tensor([0.1, 0.1, 0.7, 0.7]), torch.tensor([0, 1, 4, 9, 11])
    advantages = group_mean_global_norm(rewards, torch.tensor([0, 0, 1, 1]), torch.zeros(11), offsets)
    assert torch.equal(advantages, torch.zeros(11))


def test_returns_of_a_sequence_without_tokens_reach_no_other():
    found = returns(torch.tensor([5.0, 100.0, 1.0]), torch.tensor([0.5, 0.25, 0.125]), torch.tensor([0, 2, 2, 3]))
    assert found.tolist() == [4.25, 4.75, 0.875]
