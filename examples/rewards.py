"""Reward functions of your own: plain Python, named in a config as `rewards.py:function`.

A function takes by name what it needs of `prompts`, `completions`, `completion_ids` and the columns of the data, each a list
with one entry a completion, and returns one number (or None: does not apply) a completion. It runs in a worker process.
"""

from __future__ import annotations

import re
from typing import Any


def shows_work(completions: list[str], **columns: Any) -> list[float]:
    """1 where there is at least one calculation, such as `6 * 8 = 48`, before the answer."""
    calculation = re.compile(r"\d\s*[-+*/]\s*\d+\s*=\s*\d")
    return [float(calculation.search(text.partition("####")[0]) is not None) for text in completions]


def closeness(completions: list[str], answer: list[str], scale: float = 10.0) -> list[float | None]:
    """1 for the right whole number, less the further away it is, 0 for no number; None where the row's answer is none.

    `answer` is a column of the data; `scale` can be set with `args: {scale: 5}`.
    """
    return [_closeness(text, gold, scale) for text, gold in zip(completions, answer)]


def _closeness(text: str, gold: str, scale: float) -> float | None:
    if not re.fullmatch(r"-?\d+", gold):
        return None
    found = re.search(r"-?\d+", text)
    return scale / (scale + abs(int(found.group()) - int(gold))) if found else 0.0
