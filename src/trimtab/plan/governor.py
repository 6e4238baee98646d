"""Keeps learning from what is measured: between steps it moves an automatic token budget to where measured memory would put it.

A budget that the plan had to make small for lack of memory is raised where measured peaks show room, a quarter at a time, and
lowered where a peak came too near the limit. It stays below every size that has run out of memory (`Guard.ceiling`) and within
what is useful. Where the device waits for the host to launch its work, twice the budget is useful; some activations are then made
again instead of kept, where that costs a step little, so that it needs hardly more memory than before. What is learned does not
depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.config.run import Recompute
from trimtab.plan.ledger import GIB, UNSEEN
from trimtab.plan.planner import GRAIN, WIDEST, Plan, recompute_when_wider, useful_tokens

RAISE, LOWER = 1.25, 0.8
WAITS = 0.1
"""A device that is no further behind the host than so much of a micro-batch waits for it."""
IN_A_ROW = 2
"""Steps: the first also compiles."""


@dataclass(frozen=True)
class Move:
    """What the next step is to run with."""

    budget: int
    recompute: Recompute


@dataclass
class Governor:
    """Moves one budget. `automatic`: the user did not pin it; `may_recompute`: nor whether activations are made again."""

    plan: Plan
    automatic: bool
    may_recompute: bool = False
    updates: int = 1
    """Of a step: those of one micro-batch each gain nothing from larger ones."""
    _waited: int = field(default=0, init=False)
    """Steps in a row in which the device waited for the host."""

    def next_move(self, metrics: Mapping[str, float], now: Move, ceiling: int | None) -> Move | None:
        """What the next step is to run with, if it is something else than now. Where the guard has changed that since the step,
        it has decided."""
        peak, largest = metrics.get("memory/update_peak_gib"), metrics.get("run/max_microbatch_tokens")
        if (
            not self.automatic
            or self.plan.machine.cpu
            or not peak
            or not largest
            or now.budget != metrics.get("run/token_budget")
        ):
            return None
        self._waited = self._waited + 1 if metrics.get("run/device_behind", 1.0) < WAITS else 0
        if peak > self._limit:
            lower = max(self.plan.job.longest_trained, int(LOWER * largest) // GRAIN * GRAIN)
            return Move(lower, now.recompute) if lower < now.budget else None
        if largest <= 0.9 * now.budget or metrics.get("run/microbatches", 1) <= self.updates:
            return None
        most, step, recompute = useful_tokens(self.plan), RAISE, now.recompute
        room = (self._limit - self._states) / max(1e-9, peak - self._states)
        if self._waited >= IN_A_ROW:
            most, step = max(most, min(WIDEST, 2 * now.budget)), 2.0
            recompute = self._recompute(now, most)
            if recompute != now.recompute:
                room = 2.0 * step  # it takes hardly more memory than now
        if now.budget >= most:
            return None
        higher = int(min(most, now.budget * min(step, 0.95 * room))) // GRAIN * GRAIN
        if ceiling is not None:
            higher = min(higher, int(0.9 * ceiling))
        if higher <= now.budget:
            return None
        self._waited = 0
        return Move(higher, recompute)

    def _recompute(self, now: Move, budget: int) -> Recompute:
        if not self.may_recompute or now.recompute is not False:
            return now.recompute
        return recompute_when_wider(self.plan, now.budget, budget)

    @property
    def _limit(self) -> float:
        seen = self.plan.ledger["update"]
        unseen = seen.device_bytes - seen.allocated
        return (self.plan.limits.device - unseen) / GIB

    @property
    def _states(self) -> float:
        """What does not grow with a micro-batch, as allocated."""
        work = ("activations", "log-prob head", "backward work", *UNSEEN)
        return sum(size for name, size in self.plan.ledger["update"].device.items() if name not in work) / GIB
