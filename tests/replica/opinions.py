"""Two rewards, in a file that is quick to import: workers do it."""

from __future__ import annotations

from typing import Any


def few(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Few values, so that some groups carry no signal; and no opinion on some completions."""
    return [None if sum(ids) % 11 == 0 else (0.0, 0.0, 0.0, 0.0, 1.0, 3.0)[sum(ids) % 6] for ids in completion_ids]


def brief(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """The fewer tokens the better; not for all."""
    return [None if sum(ids) % 5 == 0 else 3.0 - len(ids) for ids in completion_ids]
