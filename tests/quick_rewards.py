"""Rewards of tests. Workers import the file of a reward function: this one is quick, and a file of tests would import torch."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any


def moody(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Raises for some completions, has no opinion on others, scores the rest; decided by the tokens alone."""
    values: list[float | None] = []
    for ids in completion_ids:
        kind = sum(ids) % 7
        if kind == 0:
            raise ValueError("a completion that this reward cannot read")
        values.append(None if kind == 1 else float(kind % 3))
    return values


def deadly(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Some completions end their worker by SIGKILL."""
    if any(sum(ids) % 11 == 0 for ids in completion_ids):
        os.kill(os.getpid(), 9)
    return [float(sum(ids) % 3) for ids in completion_ids]


def variety(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 10 + text.count("a") for text in completions]


def seen(completions: list[str], turns: list[list[dict]], environment_reward: list[float], completion_ids, **_: Any):
    """What a function is offered."""
    values = []
    for text, conversation, earned, ids in zip(completions, turns, environment_reward, completion_ids, strict=True):
        assert "".join(turn["content"] for turn in conversation).endswith(text)
        mine = "".join(turn["content"] for turn in conversation if turn["role"] == "assistant")
        assert len(mine) <= len(ids) <= len(mine) + len(conversation)  # one token a character, and ends of turns
        values.append(len(mine) + earned)
    return values


def constant(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def one_flat_group_and_one_failure(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    if answer[0] == "3":
        return [0.0] * len(completions)
    values = [float(place) for place in range(len(completions))]
    return [math.nan, *values[1:]] if answer[0] == "4" else values


def waits_for_the_update(completions: list[str], batch: list[int], **_: Any) -> list[float]:
    """Batch b waits until the update of batch b - 1 has begun, which leaves a mark."""
    mark = Path(os.environ["TRIMTAB_TEST_MARKS"]) / str(batch[0] - 1)
    deadline = time.monotonic() + 8
    while batch[0] and not mark.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no update of batch {batch[0] - 1}")
        time.sleep(0.01)
    return [float(len(set(text))) for text in completions]


def few_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text)) < 9) for text in completions]


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: Any.
    """
    return 2 * number
