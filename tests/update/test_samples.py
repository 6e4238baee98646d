"""From scored groups to advantages and weights, by hand."""

from __future__ import annotations

import pytest
import torch

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.data.prompt import Prompt
from trimtab.learn.parts import Part
from trimtab.rollout.trajectory import Group, Trajectory
from trimtab.update.samples import (
    SampleCounts,
    set_advantages,
    set_weights,
    shaped_rewards,
    split_signal,
    to_samples,
    usable,
)


def group(
    prompt: int, rewards: list[float | None], lengths: list[int] | None = None, failure: str | None = None
) -> Group:
    asked = Prompt(prompt, "", [5, 6])
    made = []
    for i, reward in enumerate(rewards):
        n = lengths[i] if lengths else 2
        made.append(
            Trajectory(
                asked,
                i,
                torch.arange(n),
                -torch.ones(n),
                torch.zeros(n),
                "stop",
                reward=reward,
                failure=failure if reward is None else None,
            )
        )
    return Group(asked, made)


def advantages(groups: list[Group], learn: Learn, kl_coef: float = 0.0, ref: float | None = None) -> list[list[float]]:
    samples = to_samples(groups)
    if ref is not None:
        for sample in (s for g in samples for s in g):
            sample.ref_logprobs = torch.full_like(sample.engine_logprobs, ref)
    set_advantages(groups, samples, resolve(learn), kl_coef)
    return [[round(float(s.advantages[0]), 3) for s in g] for g in samples]


def token_advantages(groups: list[Group], learn: Learn, kl_coef: float, ref: float) -> list[list[float]]:
    """Of each sample of the first group, token by token."""
    samples = to_samples(groups)
    for sample in (s for g in samples for s in g):
        sample.ref_logprobs = torch.full_like(sample.engine_logprobs, ref)
    set_advantages(groups, samples, resolve(learn), kl_coef)
    return [[round(float(a), 4) for a in s.advantages] for s in samples[0]]


def test_a_failed_reward_is_dropped_and_the_rest_of_its_group_is_kept() -> None:
    kept, dropped = usable([group(0, [1.0, None, 0.0], failure="boom"), group(1, [None, None])])
    assert [[t.sample for t in g.trajectories] for g in kept] == [[0, 2]]
    assert dropped == {"reward_failed": 1, "not_applicable": 2}


def test_the_ledger_notices_a_missing_completion() -> None:
    SampleCounts(5, 3, usable([group(0, [None, None])])[1]).check()
    with pytest.raises(AssertionError, match="completions went missing"):
        SampleCounts(6, 3, usable([group(0, [None, None])])[1]).check()


def test_grpo_advantages_ignore_dropped_samples() -> None:
    # Group of 1 and 0: mean 0.5, std 0.7071 (n - 1), so +-0.5 / 0.7072. Group of three equal: 0.
    kept, _ = usable([group(0, [1.0, None, 0.0], failure="x"), group(1, [1.0, 1.0, 1.0])])
    assert advantages(kept, Learn()) == [[0.707, -0.707], [0.0, 0.0, 0.0]]


def test_dr_grpo_does_not_divide() -> None:
    assert advantages([group(0, [1.0, 0.0, 0.0, 0.0])], Learn(algorithm="dr_grpo")) == [[0.75, -0.25, -0.25, -0.25]]


def test_kl_in_the_reward_lowers_it_by_the_sum_over_tokens() -> None:
    # Engine log-probs are -1 and the reference's -1.5: k1 is 0.5 a token. Lengths 2 and 4 cost 0.1 * 1.0 and 0.1 * 2.0.
    learn = Learn(algorithm="dr_grpo", kl={"coef": 0.1, "estimator": "k1", "where": "reward"})
    found = advantages([group(0, [1.0, 1.0], lengths=[2, 4])], learn, kl_coef=0.1, ref=-1.5)
    assert found == [[0.05, -0.05]]


KL_OF_RLOO = {
    # k1 is 0.5 a token, so 0.1 nats' worth a token at coef 0.2. Rewards 3 and 1; lengths 2 and 3.
    # reward: 3 - 0.2 = 2.8 and 1 - 0.3 = 0.7, each against the other.
    "reward": [[2.1, 2.1], [-2.1, -2.1, -2.1]],
    # advantage: 2 and -2, and each token pays for itself and those after it.
    "advantage": [[1.8, 1.9], [-2.3, -2.2, -2.1]],
}


@pytest.mark.parametrize("where", KL_OF_RLOO)
def test_kl_is_paid_before_the_baseline_or_after_it(where: str) -> None:
    learn = Learn(algorithm="rloo", kl={"coef": 0.2, "estimator": "k1", "where": where})
    found = token_advantages([group(0, [3.0, 1.0], lengths=[2, 3])], learn, kl_coef=0.2, ref=-1.5)
    assert found == KL_OF_RLOO[where]


def test_reinforce_pp_baseline_whitens_over_tokens_mean_included() -> None:
    """Group mean 3: -2 over three tokens, 2 over one; their mean is -1, their deviation 2. As OpenRLHF and verl have it."""
    learn = Learn(algorithm="reinforce_pp_baseline")
    assert advantages([group(0, [1.0, 5.0], lengths=[3, 1])], learn) == [[-0.5, 1.5]]


@pytest.mark.parametrize("where", ["reward", "advantage"])
def test_reinforce_pp_baseline_pays_the_kl_before_it_whitens(where: str) -> None:
    learn = Learn(algorithm="reinforce_pp_baseline", kl={"coef": 0.2, "estimator": "k1", "where": where})
    found = token_advantages([group(0, [1.0, 5.0], lengths=[3, 1])], learn, kl_coef=0.2, ref=-1.5)
    # reward: 0.7 and 4.9 around 2.8. advantage: -2 and 2, less 0.3, 0.2, 0.1 and 0.1.
    left = torch.tensor([-2.1, -2.1, -2.1, 2.1] if where == "reward" else [-2.3, -2.2, -2.1, 1.9]).double()
    expected = ((left - left.mean()) / (left.std() + 1e-4)).tolist()
    assert [*found[0], *found[1]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 1e-9])
def test_reinforce_pp_compares_tokens_with_a_kl_in_the_reward_or_without(penalty: float) -> None:
    """As its authors' code and verl do: tokens of rewards 1 and nine of 0 have mean 0.1, deviation sqrt(0.9 / 9)."""
    learn = Learn(algorithm="reinforce_pp", kl={"coef": penalty, "estimator": "k1", "where": "reward"})
    found = advantages([group(0, [1.0, 0.0], lengths=[1, 9])], learn, kl_coef=penalty, ref=-1.5 if penalty else None)
    assert found == [[2.845, -0.316]]


def test_rewards_are_clipped_then_penalised_for_running_long() -> None:
    learn = Learn(max_new_tokens=10, reward_clip=(-1.0, 1.0), overlong={"buffer": 4, "penalty": 0.5})
    groups = [group(0, [5.0, 0.5, 0.5], lengths=[3, 8, 10])]
    # Length 8 is half way through the last four tokens (-0.25); length 10 is all the way (-0.5).
    assert shaped_rewards(groups, learn).tolist() == [1.0, 0.25, 0.0]


PARTS = [Part("right", 1.0, "group"), Part("style", 0.5, "group")]


def scored_by_parts(prompt: int, right: list[float], style: list[float | None]) -> Group:
    made = group(prompt, [1.0] * len(right))
    for trajectory, first, second in zip(made.trajectories, right, style):
        trajectory.rewards = {"right": first} | ({} if second is None else {"style": second})
    return made


def test_parts_are_normalised_by_themselves_before_they_are_summed() -> None:
    # right: 0 and 2 are -+1 / sqrt(2). style: 10 and 30 the same, at half the weight.
    groups = [scored_by_parts(0, [0.0, 2.0], [30.0, 10.0]), scored_by_parts(1, [5.0, 5.0], [1.0, None])]
    half = 0.5 / 2**0.5
    assert shaped_rewards(groups, Learn(), PARTS).tolist() == pytest.approx([-half, half, 0.0, 0.0])
    summed = [Part("right"), Part("style", 0.5)]
    assert shaped_rewards(groups, Learn(), summed).tolist() == [1.0] * 4, "nothing is normalised: the scorer's own sum"


def test_signal_is_judged_on_normalised_parts() -> None:
    """Sums that are equal though their parts differ carry signal; parts that are all equal carry none."""
    trade = scored_by_parts(0, [1.0, 0.0, 0.0], [0.0, 2.0, 2.0])
    same = scored_by_parts(1, [1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    with_signal, without = split_signal([trade, same], Learn(), PARTS)
    assert [g.prompt.id for g in with_signal] == [0]
    assert [g.prompt.id for g in without] == [1]
    assert split_signal([trade, same], Learn())[0] == []
    assert split_signal([], Learn(), PARTS) == ([], [])


def test_signal_is_judged_on_the_shaped_reward() -> None:
    groups = [group(0, [2.0, 3.0]), group(1, [0.0, 1.0])]
    learn = Learn(reward_clip=(0.0, 1.0))
    with_signal, without = split_signal(groups, learn)
    assert [g.prompt.id for g in with_signal] == [1]
    assert [g.prompt.id for g in without] == [0]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token_mean", [1 / 6, 1 / 6]),
        ("sequence_mean", [1 / 4, 1 / 8]),
        ("sequence_sum", [1 / 2, 1 / 2]),
        ("constant", [1 / 20, 1 / 20]),
    ],
)
def test_weights_by_hand(aggregate: str, expected: list[float]) -> None:
    groups = [group(0, [1.0, 0.0], lengths=[2, 4])]
    (samples,) = to_samples(groups)
    set_weights(groups[0].trajectories, samples, resolve(Learn(aggregate=aggregate, max_new_tokens=10)))
    assert [float(s.weights[0]) for s in samples] == pytest.approx(expected)
    assert [s.weights.shape[0] for s in samples] == [2, 4]


def test_truncated_completions_can_be_left_out_of_the_loss() -> None:
    groups = [group(0, [1.0, 0.0], lengths=[2, 4])]
    groups[0].trajectories[1].finish = "length"
    (samples,) = to_samples(groups)
    set_weights(groups[0].trajectories, samples, resolve(Learn(mask_truncated=True, aggregate="token_mean")))
    assert [float(s.weights[0]) for s in samples] == [0.5, 0.0]
