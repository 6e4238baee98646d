"""Corrects a plan by what is measured: between steps it moves an automatic token budget to where measured memory would put it.

A budget that the plan had to make small for lack of memory is raised where measured peaks show room, a quarter at a time, and
lowered where a peak came too near the limit. It stays below every size that has run out of memory (`Guard.ceiling`) and within
what is useful. Where the device waits for the host to launch its work, twice the budget is useful; some activations are then
recomputed instead of kept, where that costs a step little, so that it needs hardly more memory than before. What is learned does
not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.config.run import Recompute
from trimtab.plan.ledger import GIB, NOT_METERED
from trimtab.plan.planner import Plan, recompute_when_wider, useful_tokens
from trimtab.plan.rows import least_budget
from trimtab.plan.rules import GRAIN_TOKENS, MAX_USEFUL_BUDGET_TOKENS

RAISE_FACTOR, LOWER_FACTOR = 1.25, 0.8
"""What the budget is multiplied by where there is room, and the largest micro-batch where a peak came too near the limit."""
MIN_FILL_TO_RAISE = 0.9
"""A budget is raised only if the largest micro-batch filled more of it than this: otherwise packing makes no use of more."""
MAX_SHARE_OF_ROOM, MAX_SHARE_OF_CEILING = 0.95, 0.9
"""How near a raised budget may come to the size that should just fit by what was measured, and to one that ran out of memory."""
WAITING_BELOW_SHARE = 0.1
"""The device is waiting for its host if it is behind it by less than this share of a micro-batch."""
WAITED_STEPS_BEFORE_RAISING = 2
"""Steps in a row that the device must have waited in: the first step also compiles."""


@dataclass(frozen=True)
class Move:
    """What the next step is to run with."""

    budget: int
    recompute: Recompute


@dataclass
class Governor:
    """Moves one budget. `automatic`: the user did not pin it. `may_recompute`: nor whether activations are recomputed."""

    plan: Plan
    automatic: bool
    may_recompute: bool = False
    updates: int = 1
    """Updates of a step: where each is one micro-batch already, larger ones gain nothing."""
    _waited: int = field(default=0, init=False)
    """Steps in a row in which the device waited for the host."""

    def next_move(self, metrics: Mapping[str, float], now: Move, ceiling: int | None) -> Move | None:
        """What the next step is to run with; None to leave it as it is. A budget that the guard has changed since the step that
        was measured stays as the guard set it."""
        peak, largest = metrics.get("memory/update_peak_gib"), metrics.get("run/max_microbatch_tokens")
        if (
            not self.automatic
            or self.plan.machine.cpu
            or not peak
            or not largest
            or now.budget != metrics.get("run/token_budget")
        ):
            return None
        self._waited = self._waited + 1 if metrics.get("run/device_behind", 1.0) < WAITING_BELOW_SHARE else 0
        if peak > self._limit:
            lower = max(
                least_budget(self.plan.job, self.plan.place.rows),
                int(LOWER_FACTOR * largest) // GRAIN_TOKENS * GRAIN_TOKENS,
            )
            return Move(lower, now.recompute) if lower < now.budget else None
        if largest <= MIN_FILL_TO_RAISE * now.budget or metrics.get("run/microbatches", 1) <= self.updates:
            return None
        most, step, recompute = useful_tokens(self.plan), RAISE_FACTOR, now.recompute
        room = (self._limit - self._states) / max(1e-9, peak - self._states)
        if self._waited >= WAITED_STEPS_BEFORE_RAISING:
            most, step = max(most, min(MAX_USEFUL_BUDGET_TOKENS, 2 * now.budget)), 2.0
            recompute = self._recompute(now, most)
            if recompute != now.recompute:
                room = 2.0 * step  # it takes hardly more memory than now
        if now.budget >= most:
            return None
        higher = int(min(most, now.budget * min(step, MAX_SHARE_OF_ROOM * room))) // GRAIN_TOKENS * GRAIN_TOKENS
        if ceiling is not None:
            higher = min(higher, int(MAX_SHARE_OF_CEILING * ceiling))
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
        """GiB that the update may allocate: the plan's limit less what no meter sees."""
        seen = self.plan.ledger["update"]
        unseen = seen.device_bytes - seen.allocated
        return (self.plan.limits.device - unseen) / GIB

    @property
    def _states(self) -> float:
        """GiB allocated in the update that do not grow with a micro-batch."""
        work = ("activations", "log-prob head", "backward work", *NOT_METERED)
        return sum(size for name, size in self.plan.ledger["update"].device.items() if name not in work) / GIB
