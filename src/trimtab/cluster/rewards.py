"""Reward models of a run on several devices: every rank has them, and each scores its share of the packed rows.

Ranks pack alike, so a score is that of one device, to the bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.cluster.ranks import Ranks
from trimtab.workers.messages import Cell


class RankedClassifier:
    """One reward model, on all ranks (reward/models.py)."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._ranks, self._number = ranks, number

    def score(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[Cell]:
        found: list[list[Cell]] = self._ranks.ask("score_rewards", self._number, list(prompts), list(completions))
        return [next((cell for cell in cells if cell is not None), None) for cells in zip(*found)]
