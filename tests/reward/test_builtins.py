"""Built-in rewards by value."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.base.errors import RewardError
from trimtab.config.schema import RewardPart
from trimtab.data.tasks import TASKS
from trimtab.reward import builtins
from trimtab.reward.builtins import BUILTINS, answer_number, numbers_in


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", []),
        ("none at all", []),
        ("It is 12.", ["12"]),
        ("$1,234.50 in all", ["1234.50"]),
        ("-$5 or $-5 or -5 or −5", ["-5", "-5", "-5", "-5"]),
        ("1,2,3", ["1", "2", "3"]),
        ("1,234,567", ["1234567"]),
        ("1,2345", ["1", "2345"]),
        ("7-3=4", ["7", "3", "4"]),
        ("(7)-3", ["7", "3"]),
        ("x=-3", ["-3"]),
        (".5 and 0.5", ["0.5", "0.5"]),
        ("50% of 8", ["50", "8"]),
        ("**18**", ["18"]),
        ("\\boxed{18}", ["18"]),
        ("3.11.2", ["3.11", "2"]),
    ],
)
def test_numbers_in_text(text, numbers):
    assert numbers_in(text) == [Decimal(number) for number in numbers]


@given(value=st.decimals(-(10**12), 10**12, places=2), words=st.text("abc $.,:;!?\n", max_size=10))
def test_a_number_is_read_back_however_it_is_written(value, words):
    for written in (f"{value}", f"{value:,}", f"${value:,}", f"{value:,}.", f"{value:,}\n"):
        assert numbers_in(f"{words} {written}")[-1] == value
        assert answer_number(f"99 {words} #### {written} 3") == value


@given(st.text())
def test_any_text_can_be_searched_for_numbers(text):
    assert all(number.is_finite() for number in numbers_in(text))


@pytest.mark.parametrize(
    ("text", "loose", "strict"),
    [
        ("first 3, then 4", "4", None),
        ("3 #### 4", "4", "4"),
        ("#### $1,000.", "1000", "1000"),
        ("#### 18\n\nQuestion: ... #### 7", "18", "18"),
        ("7 ####", None, None),
        ("no number", None, None),
    ],
)
def test_the_answer_is_after_the_mark_or_last(text, loose, strict):
    assert answer_number(text) == (loose and Decimal(loose))
    assert answer_number(text, strict=True) == (strict and Decimal(strict))


def test_number_match():
    golds = ["Reasoning 5 + 5 = <<5+5=10>>10\n#### 1,010", 3, 2.5, "18.00", "4"]
    texts = ["so 1010.", "It is 3 apples", "#### 2.50", "18", "none"]
    assert builtins.number_match(texts, answer=golds) == [1, 1, 1, 1, 0]
    assert builtins.number_match(texts, answer=golds, strict=True) == [0, 0, 1, 0, 0]
    assert builtins.number_match(["5"], column="gold", gold=[5]) == [1]
    with pytest.raises(RewardError, match="has no number in it: 'blue'"):
        builtins.number_match(["5"], answer=["blue"])
    with pytest.raises(RewardError, match="has no number in it"):
        builtins.number_match(["5"], answer=[None])
    with pytest.raises(RewardError, match="no column 'answer'; they have gold"):
        builtins.number_match(["5"], gold=["5"])


def test_exact_match():
    assert builtins.exact_match([" a\n", "A", "b"], answer=["a"] * 3) == [1, 0, 0]
    assert builtins.exact_match([" a\n", "A", "b"], answer=["a"] * 3, ignore_case=True) == [1, 1, 0]
    assert builtins.exact_match([" a", "a"], answer=["a"] * 2, strip=False) == [0, 1]
    assert builtins.exact_match(["7"], answer=[7]) == [1]
    assert builtins.exact_match([[{"role": "assistant", "content": "a"}]], answer=["a"]) == [1]
    assert builtins.exact_match([[{"role": "assistant", "content": [{"text": "a"}]}]], answer=["a"]) == [1]


def test_regex():
    texts = ["<think>x\ny</think> 5", "x <think></think>"]
    assert builtins.regex(texts, pattern="(?s)<think>.*</think>") == [1, 1]
    assert builtins.regex(texts, pattern=r"(?s)<think>.*</think> \d", mode="full") == [1, 0]


def test_length():
    ids = [[0] * n for n in (0, 10, 15, 20, 30)]
    assert builtins.length(ids, max_tokens=20, free_tokens=10) == [0, 0, -0.5, -1, -1]
    assert builtins.length(ids, max_tokens=20) == [0, -0.5, -0.75, -1, -1]


def test_math():
    pytest.importorskip("math_verify")
    golds = ["\\frac{1}{2}", "3x+1", "$(1,2)$", "12", 12, "work\n#### 1,200", "\\boxed{7}"]
    texts = ["it is \\boxed{0.5}", "$1+3x$", "$(1,2)$", "so $x=13$", "12", "\\boxed{1200}", "7"]
    assert builtins.math(texts, answer=golds) == [1, 1, 1, 0, 1, 1, 1]
    assert builtins.math(["", "no idea", "$\\frac{$"], answer=["1"] * 3) == [0, 0, 0]


def test_math_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(RewardError, match=r"trimtab\[tasks\]"):
        builtins.math([])


@pytest.mark.parametrize("name", TASKS)
def test_task_scores_the_rows_of_the_built_in_tasks(name):
    rows = TASKS[name].generate(3)
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    answers = [row["answer"] for row in rows]
    assert builtins.task(answers, **columns) == [1.0] * 3
    assert builtins.task(["nonsense"] * 3, **columns) == [0.0] * 3


def test_task_scores_reasoning_gym_rows_in_a_worker(scorer, group):
    pytest.importorskip("reasoning_gym")
    from trimtab.data.gym import load_reasoning_gym

    row = load_reasoning_gym("chain_sum", split="train", limit=1, options={"size": 2, "eval_size": 1}, seed=0)[0]
    given_group = group(row["answer"], "nonsense", **{k: v for k, v in row.items() if k != "prompt"})
    one = scorer(RewardPart(fn="task", timeout_s=60))
    one.submit(given_group)
    one.collect()
    right, wrong = (t.reward for t in given_group.trajectories)
    assert right == 1.0
    assert wrong < 1.0


@pytest.mark.parametrize("name", BUILTINS)
def test_every_built_in_is_documented_and_runs_in_a_worker(scorer, group, local_judge, name):
    assert BUILTINS[name].__doc__
    args = {"regex": {"pattern": "82"}, "length": {"max_tokens": 4}}.get(name, {})
    if name == "judge":
        args = local_judge("say:10").args()
    one = scorer(RewardPart(fn=name, args=args, timeout_s=60), workers=1)
    given_group = group("82", prompt="37+45=", answer="82", task="arithmetic")
    one.submit(given_group)
    one.collect()
    assert given_group.trajectories[0].reward == (-0.25 if name == "length" else 1.0)


@pytest.mark.parametrize("name", ["exact_match", "number_match", "math"])
@pytest.mark.parametrize("gold", [None, float("nan"), ["42"], {"answer": "42"}])
def test_a_row_without_one_answer_is_an_error_and_no_zero(name, gold):
    with pytest.raises(RewardError, match="the row's answer"):
        BUILTINS[name](["42"], answer=[gold])
