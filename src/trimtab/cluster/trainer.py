"""The Trainer of several devices: every rank has the models, and this is what the loop talks to (run/roles.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.cluster.ranks import Ranks
from trimtab.plan.governor import Governor
from trimtab.record.checkpoint import RunState
from trimtab.update.guard import Guard
from trimtab.update.stats import Scored
from trimtab.update.trainer import GuardedTrainer

SCORERS: dict[Scored, Any] = {"policy": "policy", "reference": "reference", "critic": "critic"}
"""A rank is told the model's name."""


class RankedTrainer(GuardedTrainer):
    """See run/roles.py."""

    def __init__(self, ranks: Ranks, guard: Guard, governor: Governor, critic: Guard | None) -> None:
        super().__init__(guard, governor, SCORERS, critic)
        self._ranks = ranks

    def save(self, folder: Path, state: RunState, keep: int) -> None:
        raise NotImplementedError

    def export(self, folder: Path, scores: Mapping[str, Any] | None = None) -> None:
        self._ranks.call_one(0, "export", folder, scores)
