"""pass@k against enumeration, and what an evaluation reports."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config.load import config_from_dict
from trimtab.config.schema import Eval
from trimtab.data.prompt import Prompt
from trimtab.evaluation import ks, pass_at_k, scores, success_threshold
from trimtab.rollout.trajectory import Group, Trajectory

PROMPT = Prompt(0, "q", [1])


def group(values: list[float | str | None], finish: str = "stop") -> Group:
    """Completions with a reward, None where it did not apply, a text where it failed."""
    made = []
    for sample, value in enumerate(values):
        trajectory = Trajectory(PROMPT, sample, torch.zeros(sample + 1), torch.zeros(1), torch.zeros(1), finish)  # type: ignore[arg-type]
        if isinstance(value, str):
            trajectory.failure = value
        elif value is not None:
            trajectory.rewards = {"correct": value}
        made.append(trajectory)
    return Group(PROMPT, made)


def settings(samples: int, threshold: float | None = 1.0) -> Eval:
    return Eval(samples_per_prompt=samples, threshold=threshold)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_success(case: tuple[int, int, int]) -> None:
    n, successes, k = case
    outcomes = [True] * successes + [False] * (n - successes)
    subsets = list(combinations(outcomes, k))
    assert pass_at_k(n, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [ks(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_scores_average_over_prompts() -> None:
    result = scores([group([1.0, 0.0]), group([0.0, 0.0]), group([1.0, 1.0])], settings(2), "correct")
    assert result["eval/pass@1"] == pytest.approx(0.5)
    assert result["eval/pass@2"] == pytest.approx(2 / 3)
    assert result["eval/stderr"] == pytest.approx((0.5**2 * 2 / 3) ** 0.5 / 3**0.5)
    assert (result["eval/prompts"], result["eval/failed"]) == (3.0, 0.0)
    assert result["eval/length_mean"] == pytest.approx(1.5)
    assert result["eval/truncated"] == 0.0


def test_threshold_decides_success() -> None:
    assert scores([group([0.5]), group([0.4])], settings(1, threshold=0.5), "correct")["eval/pass@1"] == 0.5


def test_failed_rewards_are_not_misses() -> None:
    result = scores(
        [group([1.0, "timeout"]), group(["timeout", "timeout"]), group([0.0, None])], settings(2), "correct"
    )
    assert result["eval/pass@1"] == 0.5
    assert "eval/pass@2" not in result, "no prompt has two scored samples"
    assert (result["eval/prompts"], result["eval/failed"], result["eval/not_applicable"]) == (2.0, 3.0, 1.0)


def test_nothing_scored_has_no_accuracy() -> None:
    result = scores([group(["raised", None])], settings(2), "correct")
    assert not any(key.startswith(("eval/pass", "eval/stderr")) for key in result)
    assert (result["eval/failed"], result["eval/not_applicable"]) == (1.0, 1.0)


def test_another_part_failing_does_not_cost_the_score() -> None:
    scored = group([1.0])
    scored.trajectories[0].failure = "the part that is not asked for"
    result = scores([scored], settings(1), "correct")
    assert (result["eval/pass@1"], result["eval/failed"]) == (1.0, 0.0)


def test_without_a_threshold_the_mean_score_over_prompts_is_reported() -> None:
    result = scores([group([1.5, 0.5]), group([-1.0, None])], settings(2, threshold=None), "correct")
    assert not [name for name in result if "pass@" in name]
    assert (result["eval/score"], result["eval/prompts"]) == (0.0, 2.0)
    assert result["eval/stderr"] == pytest.approx((1.0**2 * 2) ** 0.5 / 2)
    assert "eval/score" not in scores([group([None])], settings(1, threshold=None), "correct")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"threshold": 0.0}, 0.0),
        ({"part": "exact"}, 1.0),
        ({"part": "exact", "threshold": 0.5}, 0.5),
    ],
)
def test_a_reward_model_has_no_mark_of_success_unless_one_is_given(changes: dict, expected: float | None) -> None:
    parts = [{"fn": "model:runs/rm/final", "name": "taste"}, {"fn": "exact_match", "name": "exact"}]
    config = config_from_dict(
        {"eval": changes, "model": {"path": "m"}, "data": {"train": "d.jsonl", "eval": "e.jsonl"}, "reward": parts}
    )
    assert success_threshold(config, ["taste", "exact"]) == expected
