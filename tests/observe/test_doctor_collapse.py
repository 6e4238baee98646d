"""A policy that breaks at one step is found whenever that is. Luck and learning are not taken for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.observe.symptoms import Row, healthy_rows, record
from trimtab.observe.doctor.examine import Examination, examine
from trimtab.observe.doctor.finding import Finding
from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.shift import Shift, clear_fall, lasting_change

BROKEN: Row = {
    "reward/mean": 0.0,
    "reward/std": 0.0,
    "reward/zero_std_groups": 1.0,
    "policy/entropy": 0.0,
    "policy/grad_norm": 0.0,
    "policy/kl_old": 0.0,
    "policy/clip_fraction": 0.0,
}
SMALL_BATCH = 32.0
"""Samples of four prompts: one step's reward is mostly luck."""


def collapsing(after: int, steps: int, broken: Row = BROKEN, seed: int = 0) -> list[Row]:
    """A run whose update of step `after` breaks the policy. 0.375 before; no evaluation but the one before training."""
    rows = healthy_rows(steps, seed, rises=False)
    for row in rows:
        row.pop("eval/pass@1", None)
        row |= {"run/samples": SMALL_BATCH, "reward/mean": 0.375, "reward/std": (0.375 * 0.625) ** 0.5}
        if row["step"] > after:
            row |= broken
    return [{"step": 0, "eval/pass@1": 0.375, "eval/stderr": 0.08}, *rows]


def by_rule(done: Examination) -> dict[str, Finding]:
    return {finding.rule: finding for finding in done.findings}


def found(run: Record) -> dict[str, Finding]:
    return by_rule(examine(run))


@pytest.mark.parametrize(
    ("after", "steps"), [(after, steps) for after in (1, 2, 4, 40) for steps in (8, 25, 60, 120) if steps >= after + 4]
)
def test_a_collapse_is_found_whenever_it_comes(after: int, steps: int) -> None:
    done = examine(record(collapsing(after, steps)))
    told, since = by_rule(done), f"before step {after + 1}"
    assert told["entropy_collapse"].level == told["reward_falls"].level == "bad"
    assert since in told["entropy_collapse"].evidence and since in told["reward_falls"].evidence
    assert "0.375 before" in told["reward_falls"].evidence and "learn.lr" in told["reward_falls"].remedy
    assert since in told["gradient_drop"].evidence
    assert "gradient_spikes" not in done.healthy
    assert "the reward is constant" not in "".join(finding.cause for finding in done.findings)


@pytest.mark.parametrize("after", [1, 2, 4, 40])
def test_groups_without_signal_after_a_collapse_are_not_blamed_on_the_reward(after: int) -> None:
    told = found(record(collapsing(after, 70)))["zero_signal"]
    assert "the policy has collapsed" in told.cause and "the entropy is 0.0000 nats" in told.evidence
    scattered = {**BROKEN, "policy/entropy": 0.6}
    told = found(record(collapsing(after, 70, scattered)))["zero_signal"]
    assert f"rewards differed until step {after}" in told.evidence and "became worse" in told.cause


def test_a_policy_broken_in_its_first_row_is_told_by_the_evaluation_before_training() -> None:
    rows = collapsing(0, 30)
    told = found(record(rows))
    assert told["reward_falls"].evidence == "evaluation before training solved 37.5%; no sample of steps 1 to 30 did"
    assert "evaluation before training solved 37.5%" in told["zero_signal"].evidence
    without = found(record(rows[1:]))
    assert "reward_falls" not in without, "the reward may never have given anything"
    assert "the reward is constant" in without["zero_signal"].cause


def test_two_evaluations_are_enough_to_see_that_training_made_it_worse() -> None:
    rows = [*collapsing(1, 10), {"step": 10, "eval/pass@1": 0.0, "eval/stderr": 0.0}]
    told = found(record(rows))["eval_past_best"]
    assert told.level == "bad" and "worse than it was before the first step" in told.cause


@pytest.mark.parametrize("after", [1, 2, 4, 40])
def test_a_policy_that_breaks_into_noise_is_found_too(after: int) -> None:
    noise = {**BROKEN, "policy/entropy": 10.0, "response/length_mean": 4000.0}
    told = found(record(collapsing(after, 70, noise)))
    assert {"entropy_explosion", "reward_falls", "length_grows"} <= set(told)
    assert told["entropy_explosion"].level == "bad" and f"before step {after + 1}" in told["entropy_explosion"].evidence


@pytest.mark.parametrize("after", [1, 2, 4, 40])
def test_answers_that_vanish_at_once_are_found(after: int) -> None:
    told = found(record(collapsing(after, 70, {**BROKEN, "response/length_mean": 1.0})))
    assert "1.0 since" in told["length_collapses"].evidence


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_fall_is_seen_by_the_reward_alone_and_for_any_scale(sign: float) -> None:
    """Of a third of the run: no trend over the whole of it sees that."""
    rows = healthy_rows(120, rises=False)
    for row in rows:
        row |= {"reward/mean": sign * 40 + (20 if row["step"] <= 40 else 0), "reward/std": 15.0}
        row.pop("eval/pass@1", None)
    assert "before step 41" in found(record(rows))["reward_falls"].evidence


def test_after_a_collapse_that_leaves_no_update_the_reward_still_tells() -> None:
    """Dynamic sampling drops groups without signal, so nothing is trained and no entropy is written."""
    rows = collapsing(4, 60)
    for row in rows:
        if row["step"] > 4:
            row["run/samples"] = 512.0
            for name in [name for name in row if name.startswith("policy/")]:
                del row[name]
    for row in rows[1:5]:
        row["run/samples"] = 512.0
    told = found(record(rows))
    assert "before step 5" in told["reward_falls"].evidence
    assert "rewards differed until step 4" in told["zero_signal"].evidence


def test_a_kl_of_a_nat_needs_no_trend() -> None:
    rows = collapsing(1, 10, {**BROKEN, "policy/kl_ref": 6.0})
    assert found(record(rows))["kl_ref"].level == "bad"


def test_the_beginning_is_not_what_came_after_a_collapse() -> None:
    for after in (1, 2, 4):
        assert record(collapsing(after, 120)).early("reward/mean") == 0.375
        assert (record(collapsing(after, 120)).early("policy/entropy") or 0.0) > 0.3


def test_a_lucky_first_step_of_a_hard_task_is_no_collapse() -> None:
    rows = healthy_rows(40, rises=False)
    for row in rows:
        lucky = row["step"] == 1
        row |= {"reward/mean": 0.03 * lucky, "reward/std": 0.17 * lucky, "reward/zero_std_groups": 1.0 - 0.25 * lucky}
        row |= {"run/samples": SMALL_BATCH, "policy/grad_norm": 0.3 * lucky}
        row.pop("eval/pass@1", None)
    assert not {"reward_falls", "gradient_drop", "entropy_collapse"} & set(found(record(rows)))


def test_an_entropy_that_was_next_to_nothing_has_nothing_to_lose() -> None:
    rows = collapsing(1, 12, {"policy/entropy": 1e-4})
    for row in rows[1:2]:
        row["policy/entropy"] = 0.03
    assert "entropy_collapse" not in found(record(rows))


def test_certainty_that_comes_at_once_with_a_better_reward_is_learning() -> None:
    better = {"reward/mean": 0.8, "reward/std": 0.4, "policy/entropy": 0.05}
    assert "entropy_collapse" not in found(record(collapsing(4, 60, better)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(5, 150), share=st.sampled_from([0.01, 0.05, 0.2, 0.5]))
def test_rewards_of_few_samples_scatter_without_falling(seed: int, steps: int, share: float) -> None:
    """0 or 1, from groups of eight that share their luck to a large part; the gradient is 0 where no group has signal."""
    chance = random.Random(seed)
    rows = healthy_rows(steps, seed, rises=False)
    for row in rows:
        solved = [chance.random() < (0.9 if chance.random() < share else 0.0) for _ in range(4) for _ in range(8)]
        mean = sum(solved) / len(solved)
        row |= {"reward/mean": mean, "reward/std": (mean * (1 - mean)) ** 0.5, "run/samples": SMALL_BATCH}
        row |= {} if mean else {"policy/grad_norm": 0.0}
        row.pop("eval/pass@1", None)
    assert not {"reward_falls", "gradient_drop", "entropy_collapse"} & set(found(record(rows)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([4.0] + [0.0] * 6, Shift(1, 4.0, 0.0)),
        ([4.0, 4.0, 4.0] + [0.5] * 9, Shift(3, 4.0, 0.5)),
        ([4.0] * 20 + [0.5] * 40 + [4.0] + [0.5] * 10, Shift(20, 4.0, 0.5)),
        ([0.1] * 5 + [2.0] * 5, Shift(5, 0.1, 2.0)),
        ([4.0] * 5 + [-1e-9] * 5, Shift(5, 4.0, 0.0)),
        ([4.0] * 5 + [2.0] * 20, None),
        ([4.0] * 5 + [0.0] * 3, None),
        ([0.0] + [0.03] * 20, None),
        ([1.0, 0.1] * 20, None),
        ([-1.0] * 5 + [-9.0] * 5, None),
        ([], None),
    ],
)
def test_a_lasting_change_by_value(values: list[float], expected: Any) -> None:
    assert lasting_change(values, 4.0) == expected


def test_a_fall_by_value() -> None:
    assert clear_fall([1.0] * 10 + [0.0] * 10, 0.1) == Shift(10, 1.0, 0.0)
    assert clear_fall([0.0] * 10 + [1.0] * 10, 0.1) is None
    assert clear_fall([1.0] + [0.0] * 30, 0.3) is None, "a single value is believed where it is eight errors away"
    assert clear_fall([1.0] + [0.0] * 30, 0.1) == Shift(1, 1.0, 0.0)
    assert clear_fall([], 0.1) is None
