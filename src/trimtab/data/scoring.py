"""The score of a completion by the generated task that its row came from: what the `task` reward calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.base.errors import DataError
from trimtab.data.gym import score_reasoning_gym
from trimtab.data.tasks import TASKS


def score_row(completion: str, row: Mapping[str, Any]) -> float:
    """0..1 for a row of `task:NAME` or `reasoning_gym:NAME` (a Prompt's columns are enough)."""
    if "rg_task" in row:
        return score_reasoning_gym(completion, row)
    if row.get("task") in TASKS:
        return TASKS[row["task"]].score(completion, row)
    raise DataError(
        "The task reward scores only rows from task:NAME and reasoning_gym:NAME, and this row "
        f"(columns {', '.join(row)}) comes from neither. Use another reward, such as exact_match."
    )
