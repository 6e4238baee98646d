"""How many ranks share each micro-batch, by the model that passes over it (`run.sequence_parallel`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from trimtab.config.run import RowRole, Run

ROLES: tuple[RowRole, ...] = ("policy", "reference", "critic")


def row_ranks(run: Run) -> dict[RowRole, int]:
    """Of a run that is planned, or of what a user has written, where what is left open is 1. A model that is not named shares
    its rows as the policy does."""
    asked = run.sequence_parallel
    if asked == "auto":
        return dict.fromkeys(ROLES, 1)
    if isinstance(asked, int):
        return dict.fromkeys(ROLES, asked)
    return {role: asked.get(role, asked.get("policy", 1)) for role in ROLES}


def of_roles(run: Run, roles: Sequence[str]) -> Literal["auto"] | dict[RowRole, int]:
    """What devices with these roles are asked for, where they do not train the policy: sizes of their own models."""
    own: list[RowRole] = [role for role in ROLES if role in roles]
    if run.sequence_parallel == "auto" or not own:
        return "auto"
    asked = row_ranks(run)
    first = asked["critic" if "critic" in own else own[0]]
    return {role: asked[role] if role in own else first for role in ROLES}


def longest_here(run: Run, longest: int, budget: str) -> int:
    """Tokens that a device has of the longest sequence, for `token_budget` or `score_token_budget`; of a model that shares its
    rows among the fewest."""
    passing = ROLES if budget != "token_budget" else ("policy", "critic")
    return -(-longest // min(row_ranks(run)[role] for role in passing))


def written(sizes: dict[RowRole, int]) -> int | dict[RowRole, int]:
    """As it is written: one number where all are the same."""
    return sizes["policy"] if len(set(sizes.values())) == 1 else sizes
