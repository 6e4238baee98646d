"""What a judge reads and what it answers: the prompt's template, and a strict reading of the score.

A score is a finite number within the scale. It is the group of `pattern` in its last match, where there is a pattern. Otherwise
the answer, without what stands before the last </think>, must be one of

    7.5                         the number alone
    {"score": 7.5}              JSON, alone, in a code fence, or as the last object of the answer
    ... Score: 7.5              the last line, of any answer

Anything else is no score: a number that stands somewhere in a sentence is not taken for one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import regex

from trimtab.errors import RewardError
from trimtab.reward.text import text_of

OWN = ("prompt", "completion")
FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
NUMBER = r"[-+]?[0-9]+(?:\.[0-9]+)?"
LAST_LINE = re.compile(rf"[\s*_#>-]*score[\s*_:=-]*?({NUMBER})[\s*_.]*", re.IGNORECASE)
READ_CHARACTERS = 20_000
"""Characters of an answer that are read, from its end: a score comes last."""
PATTERN_TIMEOUT_S = 1.0
"""Limit of a user's pattern on one answer; some patterns take longer than the universe will."""


class Template:
    """Text with {prompt}, {completion} and columns in braces. Other braces stay as they are, so JSON can be asked for."""

    def __init__(self, text: str, reserved: set[str]) -> None:
        self.text = text
        named = list(dict.fromkeys(FIELD.findall(text)))
        if "completion" not in named:
            raise RewardError(
                "reward.args: judge: prompt has no {completion} in it, so every completion would get the same score. Write "
                "where it goes, such as 'Rate this answer from 0 to 10: {completion}'"
            )
        self.columns = frozenset(named) - {*OWN}
        for name in sorted(self.columns & reserved):
            raise RewardError(
                f"reward.args: judge: {{{name}}} in prompt is the name of an option of the judge, so no column can have it. "
                "Rename the column"
            )

    def __str__(self) -> str:
        return self.text

    def fill(self, prompt: Any, completion: Any, row: Mapping[str, Any]) -> str:
        """In one pass: braces in what is put in are not looked at again. A RewardError where the row lacks a value."""
        values = {"prompt": whole_text(prompt), "completion": whole_text(completion)}
        for name in self.columns:
            if row.get(name) is None:
                raise RewardError(f"the row has nothing in its column {name!r}, which the judge's prompt names")
            values[name] = str(row[name])
        return FIELD.sub(lambda match: values[match[1]], self.text)


def whole_text(said: Any) -> str:
    """One message is its text; a longer conversation has each speaker's name in front."""
    if isinstance(said, str):
        return said
    if len(said) == 1:
        return text_of(said)
    return "\n\n".join(f"{message['role']}: {text_of([message])}" for message in said)


def read_score(answer: str, scale: tuple[float, float], pattern: regex.Pattern[str] | None) -> float | None:
    """The score in an answer; None where there is none, or none within the scale."""
    answer = answer[-READ_CHARACTERS:].strip()
    found = _by_pattern(answer, pattern) if pattern else _by_form(answer.rpartition("</think>")[2].strip())
    low, high = scale
    return found if found is not None and math.isfinite(found) and low <= found <= high else None


def _by_pattern(answer: str, pattern: regex.Pattern[str]) -> float | None:
    try:
        matches = pattern.findall(answer, timeout=PATTERN_TIMEOUT_S)
    except TimeoutError:
        return None
    return _number(matches[-1].strip()) if matches else None


def _by_form(answer: str) -> float | None:
    if (alone := _number(answer)) is not None:
        return alone
    if (score := _in_json(answer)) is not None:
        return score
    last = LAST_LINE.fullmatch(answer.splitlines()[-1]) if answer else None
    return float(last[1]) if last else None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(NUMBER, text) else None


def _in_json(answer: str) -> float | None:
    """The whole answer, or its last {...} that has no other in it: thoughts before it may hold braces, too."""
    whole = re.sub(r"^```\w*\s*|\s*```$", "", answer)
    for text in (whole, *re.findall(r"\{[^{}]*\}", answer)[-1:]):
        try:
            held = json.loads(text)
        except (ValueError, RecursionError):
            continue
        score = held.get("score") if isinstance(held, dict) else None
        if isinstance(score, int | float) and not isinstance(score, bool):
            return float(str(score))  # a whole number of 400 digits is infinite, not an error
    return None
