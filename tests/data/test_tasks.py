"""Built-in tasks: deterministic, disjoint, scored exactly."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.base.errors import DataError
from trimtab.data.scoring import score_row
from trimtab.data.tasks import TASKS, load_task, split_of

names = pytest.mark.parametrize("name", list(TASKS))


def load(name: str, **keys: Any) -> list[dict[str, Any]]:
    return load_task(name, **{"split": "train", "limit": None, "options": {}, "seed": 0, **keys})


def refused(name: str, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        load(name, options=options)
    return str(error.value)


@names
def test_same_seed_same_rows_and_another_seed_others(name: str) -> None:
    options = {"size": 50}
    assert load(name, options=options) == load(name, options=options)
    assert load(name, options=options) != load(name, options=options, seed=1)
    assert load(name, options={**options, "seed": 1}) == load(name, options=options, seed=1)


@names
@pytest.mark.parametrize("difficulty", [1, 2, 3, 12])
def test_rows_are_distinct_and_splits_disjoint(name: str, difficulty: int) -> None:
    options = {"size": 300, "eval_size": 100, "difficulty": difficulty}
    try:
        held_out = load(name, split="eval", options=options, seed=7)
    except DataError:
        assert difficulty == 1  # a handful of problems, and none of them fell to eval
        held_out = []
    prompts = [row["prompt"] for row in load(name, options=options)]
    eval_prompts = [row["prompt"] for row in held_out]
    assert len(set(prompts)) == len(prompts)
    assert len(set(eval_prompts)) == len(eval_prompts)
    assert not set(prompts) & set(eval_prompts)
    if difficulty == 12:
        assert (len(prompts), len(eval_prompts)) == (300, 100)


def test_the_problems_are_these() -> None:
    """A change here changes what every user of a task trains on."""
    examples = {name: TASKS[name].problem(543, 5, **TASKS[name].options) for name in TASKS}
    assert examples == {
        "arithmetic": ("10000+10543=", "20543"),
        "sort": ("sort 34500=", "00345"),
        "reverse": ("reverse xuaaa=", "aaaux"),
        "count": ("count a in bacac=", "2"),
    }
    assert [row["prompt"] for row in load("arithmetic", limit=3)] == FIRST_ARITHMETIC


FIRST_ARITHMETIC = ["36+26=", "40+10=", "11+41="]


@given(st.integers(10, 99), st.integers(10, 99), st.sampled_from("+-*"))
def test_arithmetic_is_right(a: int, b: int, op: str) -> None:
    index = ((a - 10) * 90 + (b - 10)) * 3 + "+-*".index(op)
    prompt, answer = TASKS["arithmetic"].problem(index, 2, ops="+-*")
    assert prompt == f"{a}{op}{b}="
    assert int(answer) == {"+": a + b, "-": a - b, "*": a * b}[op]


def test_difficulty_is_the_number_of_digits() -> None:
    for difficulty in (1, 2, 5):
        for row in load("arithmetic", options={"difficulty": difficulty, "size": 20, "ops": "+-"}):
            left, right = row["prompt"].rstrip("=").replace("-", "+").split("+")
            assert len(left) == len(right) == difficulty


def test_subtraction_only_when_asked_for() -> None:
    assert not any("-" in row["prompt"] for row in load("arithmetic"))
    assert any("-" in row["prompt"] for row in load("arithmetic", options={"ops": "+-"}))


def test_split_shares() -> None:
    prompts = [f"{a}+{b}=" for a in range(100) for b in range(100)]
    share = sum(split_of(prompt) == "eval" for prompt in prompts) / len(prompts)
    assert 0.1 < share < 0.15


def test_small_space_gives_all_there_is_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train = load("arithmetic", options={"difficulty": 1})
    held_out = load("arithmetic", split="eval", options={"difficulty": 1})
    assert len(train) + len(held_out) == 100
    assert f"has only {len(train)} train problems at difficulty 1; 4096 were asked for" in caplog.text


def test_no_problem_at_all_is_an_error() -> None:
    assert {split_of("reverse c="), split_of("reverse d=")} == {"train"}
    with pytest.raises(DataError, match="no eval problems at difficulty 1"):
        load("reverse", split="eval", options={"difficulty": 1, "letters": "cd"})


def test_limit() -> None:
    assert load("sort", limit=5) == load("sort")[:5]


@names
def test_score_of_right_and_wrong_completions(name: str) -> None:
    for row in load(name, limit=10):
        columns = {key: value for key, value in row.items() if key != "prompt"}
        assert score_row(row["answer"], columns) == 1.0
        assert score_row(f"  {row['answer']} \nand more", columns) == 1.0
        assert score_row(row["answer"] + "0", columns) == 0.0
        assert score_row("", columns) == score_row(" \n ", columns) == 0.0


def test_unknown_names_and_options() -> None:
    assert "Did you mean 'arithmetic'?" in refused("arithmetics")
    message = refused("arithmetic", dificulty=2)
    assert "Did you mean 'difficulty'?" in message
    assert "Options: difficulty, size, eval_size, seed, ops." in message


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sort", {"difficulty": 0}),
        ("sort", {"difficulty": 2.5}),
        ("sort", {"difficulty": True}),
        ("sort", {"size": 0}),
        ("sort", {"size": "10"}),
        ("sort", {"letters": "a"}),
        ("sort", {"letters": "aab"}),
        ("sort", {"letters": 3}),
        ("sort", {"seed": -1}),
        ("arithmetic", {"ops": "/"}),
        ("arithmetic", {"ops": ""}),
    ],
)
def test_bad_option_values_are_named(name: str, options: dict[str, Any]) -> None:
    assert next(iter(options)) in refused(name, **options)


def test_rows_of_no_task_are_refused_by_the_task_reward() -> None:
    with pytest.raises(DataError, match="Use another reward"):
        score_row("4", {"answer": "4"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 10**9}, "option size must be at most 10,000,000, not 1000000000"),
        ({"difficulty": 10**6}, "option difficulty must be at most 1,000, not 1000000"),
        ({"difficulty": -(10**5000)}, "not a value too long to show"),
    ],
)
def test_options_that_would_take_hours_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_task("arithmetic", split="train", limit=None, options=options, seed=0)
