"""pass@k against enumeration, what an evaluation reports, and how it samples."""

from __future__ import annotations

import json
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trimtab
from trimtab.config.load import config_from_dict
from trimtab.config.schema import Eval
from trimtab.data.prompt import Prompt
from trimtab.record.sinks import read_metrics
from trimtab.rollout.trajectory import Group, Trajectory
from trimtab.run.evaluation import ks, pass_at_k, scores, success_threshold

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
    data = {"train": "d.jsonl", "eval": "e.jsonl"}
    config = config_from_dict({"model": {"path": "m"}, "data": data, "reward": parts, "eval": changes})
    assert success_threshold(config, ["taste", "exact"]) == expected


# --- how evaluation samples

TRAINING = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 24, "lr": 1e-9}
RUN = {"device": "cpu", "threads": 1, "reward_workers": 1}
ROWS = [{"prompt": f"{n}+{n}="} for n in range(6)]


def completions_of(model: Path, learn: dict[str, Any], eval: dict[str, Any] | None = None) -> tuple[list[str], float]:
    """The texts of an evaluation, and the share of them that was cut off."""
    with tempfile.TemporaryDirectory() as folder:  # rewards run in a process of their own
        written = Path(folder) / "texts.jsonl"

        def collect(completions: list[str], **_: Any) -> list[float]:
            with written.open("a") as file:
                file.writelines(json.dumps(text) + "\n" for text in completions)
            return [0.0] * len(completions)

        settings_ = {"learn": TRAINING | learn, "eval": eval or {}, "run": RUN}
        result = trimtab.evaluate(model=model, data=ROWS, reward=collect, **settings_)
        texts = sorted(map(json.loads, written.read_text().splitlines()))
    assert len(texts) == len(ROWS)
    return texts, result["eval/truncated"]


def test_evaluation_is_greedy_whatever_training_draws(model_folder: Path) -> None:
    """With the sampling of training another seed would draw other completions."""
    first, again = (completions_of(model_folder, {"seed": seed}) for seed in (0, 1))
    assert first == again
    drawn, other = (completions_of(model_folder, {"seed": seed}, {"sampling": {"temperature": 1.0}}) for seed in (0, 1))
    assert drawn != other


def test_evaluation_ends_completions_where_training_does(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """The same weights, with stops in learn.sampling only: cut off before, ended now; in training's evaluations too."""
    free, cut_free = completions_of(model_folder, {})
    stop = max(free, key=len)[3]
    ended, cut = completions_of(model_folder, {"sampling": {"stop": [stop]}})
    assert cut < cut_free
    assert all(text.endswith(stop) and text.count(stop) == 1 for text in ended if stop in text)
    assert "stop " + repr(stop) in capsys.readouterr().out.replace("\n", " ")
    assert completions_of(model_folder, {"sampling": {"stop": [stop]}}, {"sampling": {"stop": []}}) == (free, cut_free)
    trimtab.train(
        model=model_folder,
        data=ROWS,
        eval_data=ROWS,
        reward=lambda completions, **_: [float(stop in text) for text in completions],
        learn=TRAINING | {"sampling": {"stop": [stop]}},
        run=RUN,
        observe={"dir": str(tmp_path / "run"), "tensorboard": False},
    )
    first = read_metrics(tmp_path / "run")[0]
    assert (first["step"], first["eval/truncated"]) == (0, cut)
    assert first["eval/pass@1"] == sum(stop in text for text in ended) / len(ended) > 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "evaluation greedy (training: temperature 1), 1 sample a prompt (training: 2)" in shown


def test_evaluation_ends_completions_at_the_stop_tokens_of_training(model_folder: Path) -> None:
    every = {"sampling": {"stop_token_ids": list(range(3, 80))}}
    texts, cut = completions_of(model_folder, every)
    assert cut == 0.0
    assert max(map(len, texts)) <= 2
    assert completions_of(model_folder, every, {"sampling": {"stop_token_ids": []}})[1] > 0.0
