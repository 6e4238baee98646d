"""Keeps learning from what is measured: between steps it moves an automatic token budget to where measured memory would put it.

A budget that the plan had to make small for lack of memory is raised where measured peaks show room, a quarter at a time, and
lowered where a peak came too near the limit. It stays below every size that has run out of memory (`Guard.ceiling`) and within
what is useful. What is learned does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.plan.ledger import GIB, UNSEEN
from trimtab.plan.planner import GRAIN, Plan, useful_tokens

RAISE, LOWER = 1.25, 0.8


@dataclass
class Governor:
    """Moves one budget. `automatic`: the user did not pin it."""

    plan: Plan
    automatic: bool

    @property
    def _limit(self) -> float:
        seen = self.plan.ledger["update"]
        unseen = seen.device_bytes - seen.allocated
        return (self.plan.limits.device - unseen) / GIB

    def next_budget(self, metrics: Mapping[str, float], budget: int, ceiling: int | None) -> int | None:
        """The budget of the next step, if it should be another one than the updater's of now. Where the guard has changed that
        since the step, it has decided."""
        peak, largest = metrics.get("memory/update_peak_gib"), metrics.get("run/max_microbatch_tokens")
        if (
            not self.automatic
            or self.plan.machine.cpu
            or not peak
            or not largest
            or budget != metrics.get("run/token_budget")
        ):
            return None
        if peak > self._limit:
            lower = max(self.plan.job.longest_trained, int(LOWER * largest) // GRAIN * GRAIN)
            return lower if lower < budget else None
        filled = largest > 0.9 * budget and metrics.get("run/microbatches", 1) > 1
        most = useful_tokens(self.plan)
        if not filled or budget >= most:
            return None
        states = self._states
        room = (self._limit - states) / max(1e-9, peak - states)
        higher = int(min(most, budget * min(RAISE, 0.95 * room))) // GRAIN * GRAIN
        if ceiling is not None:
            higher = min(higher, int(0.9 * ceiling))
        return higher if higher > budget else None

    @property
    def _states(self) -> float:
        """What does not grow with a micro-batch, as allocated."""
        work = ("activations", "log-prob head", "backward work", *UNSEEN)
        return sum(size for name, size in self.plan.ledger["update"].device.items() if name not in work) / GIB
