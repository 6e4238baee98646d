"""The calculator: right, and safe whatever a model writes."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.rollout.conversations.calculator import MAX_RESULT_DIGITS, calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        (" 2 + 3 * (4 - 1) ", "11"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("7//2", "3"),
        ("-7 % 3", "2"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("3 × 4 ÷ 2", "6"),
        ("sqrt(144)", "12"),
        ("sqrt(2)", "1.41421356237"),
        ("round(3.14159, 2)", "3.14"),
        ("max(1, 2.5, -3) + min(4, 2) - abs(-1)", "3.5"),
        ("123456789 * 987654321", "121932631112635269"),
        ("1e3", "1000"),
        ("+5", "5"),
        ("1**1000000", "1"),
    ],
)
def test_it_calculates(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "1 +", "x + 1", "__import__('os').system('true')", "(1).__class__", "[1, 2]", "'a' * 9", "lambda: 1", "1 if 1 else 2",
        "1 < 2", "f(1)", "round(x=1)", "True + 1", "1; 2", "a := 3", "1 and 2", "9" * 501, "(-8) ** 0.5", "1e999", "\x00",
        "print(1)", "min()", "{1: 2}[1]", "1j * 1j", "...", "round(5, -999999999)", "sqrt(-1)", "1 / 0",
        "(" * 200 + "1" + ")" * 200 + "+",
    ],
)  # fmt: skip
def test_what_is_not_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        calculator(expression)


@pytest.mark.parametrize(
    "expression", ["9**9**9", "9**9**9**9", "2**99999999", "(10**900)*(10**900)", "10**-99999999", "9**9999"]
)
def test_no_expression_takes_long(expression: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"more than {MAX_RESULT_DIGITS} digits"):
        calculator(expression)
    assert time.monotonic() - started < 0.5


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30), st.sampled_from("+-*"))
def test_whole_numbers_are_exact(a: int, b: int, sign: str) -> None:
    assert calculator(f"({a}) {sign} ({b})") == str({"+": a + b, "-": a - b, "*": a * b}[sign])


@settings(max_examples=300, deadline=500)
@given(st.text(alphabet="0123456789+-*/%^().,e sqrtabmin", max_size=60))
def test_any_text_is_answered_or_refused(expression: str) -> None:
    with contextlib.suppress(ValueError, TypeError, ArithmeticError):
        assert isinstance(calculator(expression), str)


def test_python_says_nothing_of_what_a_model_writes(recwarn: pytest.WarningsRecorder) -> None:
    for expression in ("12if 3 else 4", "1 is 1", "0x1for 2"):
        with pytest.raises(ValueError, match="arithmetic"):
            calculator(expression)
    assert not recwarn.list
