"""Every rule that maps a flag, against keys and values that were written by hand: see expectations.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.convert.expectations import EXPECTED
from trimtab.convert import FRAMEWORKS, convert

PROGRAMS = {"trl": ["trl", "grpo"]}
"""What keeps a single flag of PPO's or of supervised training from being taken for a sign of it."""


def given(kind: str, words: str) -> list[str]:
    return PROGRAMS.get(kind, []) + [word.replace("A.", "actor_rollout_ref.") for word in words.split()]


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_every_mapped_rule_has_an_expectation(kind: str) -> None:
    rules = {rule.name for rule in FRAMEWORKS[kind].rules if rule.outcome == "mapped"}
    assert {name for name, _, _ in EXPECTED[kind]} == rules


@pytest.mark.parametrize(
    ("kind", "name", "words", "expected"),
    [pytest.param(kind, *case, id=f"{kind} {case[0]}") for kind, cases in EXPECTED.items() for case in cases],
)
def test_a_flag_goes_where_it_should(kind: str, name: str, words: str, expected: dict[str, Any]) -> None:
    found = convert(kind, words=given(kind, words))
    rule = next(rule for rule in FRAMEWORKS[kind].rules if rule.name == name)
    line = next(line for line in found.lines if line.rule is rule)
    config = {key: put.value for key, put in found.sheet.keys.items()}
    assert {key: config.get(key) for key in expected} == expected
    assert (line.outcome == "mapped") == bool(expected), line.as_dict()
