"""Rewards that need no code: `fn: NAME`, with their options under `args`.

Each is pure: the value of a sample depends on that sample and its row alone. A completion that is wrong, empty or
malformed scores what it deserves; a row that lacks what the reward needs is an error, never a zero.
Every one accepts an empty batch, so that options are checked before the run starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from trimtab.base.errors import RewardError
from trimtab.reward.judge.reward import judge
from trimtab.reward.text import text_of

Rewards = list[float | None]

NUMBER = re.compile(
    r"""(?P<minus>(?<![\w)\].])[-−])?      # a sign; after a letter, a digit or a bracket it is a subtraction
        [$€£]?
        (?P<digits>
            (?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?   # 12 | 1,234,567 | 3.50; the dot that ends a sentence stays out
            |(?<!\d)\.\d+                                # .5
        )""",
    re.VERBOSE,
)


def numbers_in(text: str) -> list[Decimal]:
    """Every number in a text, in order: signs, currency signs, thousands commas and trailing dots understood."""
    found = []
    for match in NUMBER.finditer(text):
        value = Decimal(match["digits"].replace(",", ""))
        found.append(-value if match["minus"] else value)
    return found


def answer_number(text: str, *, strict: bool = False) -> Decimal | None:
    """The number after the first `####`; without that mark the last number, or none where `strict`."""
    _, mark, after = text.partition("####")
    if mark:
        return next(iter(numbers_in(after)), None)
    return None if strict else next(reversed(numbers_in(text)), None)


def _gold_number(value: Any) -> Decimal:
    try:
        gold = answer_number(value) if isinstance(value, str) else Decimal(str(value))
    except InvalidOperation:
        gold = None
    if gold is None or not gold.is_finite():
        raise RewardError(f"the row's answer has no number in it: {str(value)[:80]!r}")
    return gold


def _golds(columns: dict[str, Any], column: str, count: int) -> Sequence[Any]:
    if column in columns:
        return columns[column]
    if count:
        raise RewardError(
            f"the rows have no column {column!r}; they have {', '.join(sorted(columns)) or 'only the prompt'}. "
            "Set reward.args: column"
        )
    return []


def _gold_text(value: Any) -> str:
    """Nothing, or several answers, would be text that no completion has: every one would score 0, and no failure show it."""
    if value is None or value != value or isinstance(value, list | tuple | dict | set):
        raise RewardError(f"the row's answer is {str(value)[:80]}; it must be one text or number")
    return str(value)


def exact_match(
    completions: list[Any], *, column: str = "answer", strip: bool = True, ignore_case: bool = False, **columns: Any
) -> Rewards:
    """1 where the completion is the text in `column`, otherwise 0. strip: without white space around both."""

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    golds = [normal(_gold_text(gold)) for gold in _golds(columns, column, len(completions))]
    return [float(normal(text_of(c)) == gold) for c, gold in zip(completions, golds)]


def number_match(completions: list[Any], *, column: str = "answer", strict: bool = False, **columns: Any) -> Rewards:
    """1 where the completion's number equals the one in `column`, otherwise 0.

    The completion's number is the one after its first `####`; without that mark its last one, or none where `strict`.
    The column holds a number, or text with the answer in the same form (GSM8K's `... #### 1,234`).
    """
    golds = [_gold_number(gold) for gold in _golds(columns, column, len(completions))]
    return [float(answer_number(text_of(c), strict=strict) == gold) for c, gold in zip(completions, golds)]


def regex(completions: list[Any], *, pattern: str, mode: Literal["search", "full"] = "search") -> Rewards:
    """1 where `pattern` is found in the completion (mode: search) or is all of it (mode: full), otherwise 0.

    The syntax is Python's; flags go into the pattern, such as `(?si)` for a dot that matches newlines and no case.
    """
    if mode not in ("search", "full"):
        raise RewardError(f"mode is {mode!r}; write search or full")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RewardError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    match = compiled.search if mode == "search" else compiled.fullmatch
    return [float(match(text_of(completion)) is not None) for completion in completions]


def length(completion_ids: list[list[int]], *, max_tokens: int, free_tokens: int = 0) -> Rewards:
    """A penalty for length: 0 up to `free_tokens`, then falling linearly to -1 at `max_tokens`, and -1 beyond."""
    if not 0 <= free_tokens < max_tokens:
        raise RewardError(f"free_tokens ({free_tokens}) must be at least 0 and less than max_tokens ({max_tokens})")
    over = [max(0, len(ids) - free_tokens) / (max_tokens - free_tokens) for ids in completion_ids]
    return [-min(1.0, share) for share in over]


def math(completions: list[Any], *, column: str = "answer", **columns: Any) -> Rewards:
    """1 where math-verify finds the completion's answer equal to the one in `column`, otherwise 0.

    LaTeX (`\\boxed{...}`, `$...$`) and plain expressions are understood, and 1/2 equals 0.5. The part's timeout_s ends
    expressions that take too long to compare. Needs trimtab[tasks].
    """
    try:
        import math_verify
    except ImportError as error:
        raise RewardError("the math reward needs math-verify: pip install 'trimtab[tasks]'") from error
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; ours are on

    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None)

    def parse_gold(value: Any) -> list[Any]:
        text = _gold_text(value).rpartition("####")[2].strip()
        # Bare LaTeX, as most data sets have it, parses only inside dollars.
        gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$") or parse(text)
        if not gold:
            raise RewardError(f"math-verify finds no expression in the row's answer {str(value)[:80]!r}")
        return gold

    golds = _golds(columns, column, len(completions))
    return [
        float(math_verify.verify(parse_gold(gold), parse(text_of(c)), timeout_seconds=None))
        for c, gold in zip(completions, golds)
    ]


def task(completions: list[Any], **columns: Any) -> Rewards:
    """The score, 0 to 1, by the built-in or reasoning_gym task that the row came from (`data.train: task:NAME` and
    `reasoning_gym:NAME`). Takes no options: the rows carry what is needed."""
    from trimtab.data.scoring import score_row

    rows = [{name: values[sample] for name, values in columns.items()} for sample in range(len(completions))]
    return [score_row(text_of(completion), row) for completion, row in zip(completions, rows)]


BUILTINS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "number_match": number_match,
    "regex": regex,
    "length": length,
    "math": math,
    "task": task,
    "judge": judge,
}
