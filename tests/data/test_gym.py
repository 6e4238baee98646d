"""reasoning_gym rows: deterministic, disjoint, and scored by the package's own verifiers from what a row carries."""

from __future__ import annotations

import builtins
import pickle
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from trimtab.base.errors import DataError
from trimtab.data import gym
from trimtab.data.gym import _settings, load_reasoning_gym, score_reasoning_gym
from trimtab.data.scoring import score_row


def load(name: str, **keys: Any) -> list[dict[str, Any]]:
    options = {"size": 20, "eval_size": 10, **keys.pop("options", {})}
    return load_reasoning_gym(name, **{"split": "train", "limit": None, "options": options, "seed": 0, **keys})


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting", "mini_sudoku", "countdown", "word_ladder"])
def test_rows_are_deterministic_and_the_right_answer_scores_one(name: str) -> None:
    rows = load(name)
    assert len(rows) == 20
    assert rows == load(name)
    for row in rows[:3]:
        columns = pickle.loads(pickle.dumps({key: value for key, value in row.items() if key != "prompt"}))
        assert score_row(row["answer"], columns) == 1.0
        assert score_row(f"Let me think.\n<answer> {row['answer']}\n</answer>", columns) == 1.0
        assert score_row("<answer>certainly wrong</answer>", columns) < 0.1


def test_every_task_name_is_accepted() -> None:
    from reasoning_gym import factory

    assert len(factory.DATASETS) > 100
    for name in factory.DATASETS:
        assert _settings(name, {"size": 5, "seed": 1}) == {}


def test_train_and_eval_share_no_question() -> None:
    """So small a space collides by chance, whatever the seeds."""
    small = {
        "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 200, "eval_size": 60}
    }
    train, held_out = load("chain_sum", **small), load("chain_sum", split="eval", **small)
    assert len(held_out) == 60
    assert len(train) > 100
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_neighbouring_seeds_are_not_shifted_copies() -> None:
    one, two = load("chain_sum", seed=0), load("chain_sum", seed=1)
    assert not {row["prompt"] for row in one} & {row["prompt"] for row in two}


def test_limit() -> None:
    assert load("gcd", limit=3) == load("gcd")[:3]
    assert load("gcd", limit=3, split="eval") == load("gcd", split="eval")[:3]


def test_difficulty_is_the_level_of_the_curriculum() -> None:
    assert _settings("chain_sum", {"difficulty": 1}) != _settings("chain_sum", {"difficulty": 4})
    assert _settings("chain_sum", {"difficulty": 1, "max_terms": 2})["max_terms"] == 2
    assert len(load("chain_sum", options={"difficulty": 2})) == 20
    assert _settings("gsm_symbolic", {"difficulty": 0.5}) == {"difficulty": 0.5}  # the task's own field


def test_composite_of_tasks() -> None:
    specs = [{"name": name, "weight": 1.0, "config": {}} for name in ("gcd", "lcm")]
    rows = load("composite", options={"datasets": specs})
    assert {row["rg_metadata"]["source_dataset"] for row in rows} == {"gcd", "lcm"}
    assert all(score_reasoning_gym(row["answer"], row) == 1.0 for row in rows)


@pytest.mark.parametrize(
    ("name", "answer"), [("boxnet", "[[1]]"), ("coin_flip", "1e999"), ("game_of_life", '{"a": 1}')]
)
def test_answer_that_a_verifier_trips_over_is_wrong(name: str, answer: str) -> None:
    (row,) = load(name, limit=1)
    assert score_row(answer, row) == 0.0


def test_a_verifier_that_trips_over_the_right_answer_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            raise KeyError("size")

    (row,) = load("coin_flip", limit=1)
    monkeypatch.setattr(gym, "_dataset", lambda *_: Broken())
    with pytest.raises(KeyError):
        score_row("0.5", row)


def test_answer_that_a_verifier_cannot_parse_is_wrong() -> None:
    assert score_reasoning_gym("garbage", load("prime_factorization")[0]) == 0.0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("chain_sums", {}, "Did you mean 'chain_sum'"),
        ("chain_sum", {"max_term": 3}, "Did you mean 'max_terms'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "does not accept these options"),
        ("chain_sum", {"difficulty": 99}, "must be from 1 to"),
        ("chain_sum", {"difficulty": 0}, "at least 1"),
        ("acre", {"difficulty": 1}, "no curriculum"),
        ("composite", {}, "at least one dataset"),
        ("chain_sum", {"size": -1}, "size"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        load(name, options=options)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fake(name: str, *rest: Any, **keys: Any) -> Any:
        if name == "reasoning_gym":
            raise ImportError(name)
        return real(name, *rest, **keys)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(DataError, match=r"trimtab\[tasks\]"):
        load("chain_sum")


def test_tasks_that_do_not_repeat_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    load("ransom_note")
    assert "PYTHONHASHSEED" in caplog.text
