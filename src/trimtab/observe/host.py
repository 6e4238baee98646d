"""Watches host memory and warns, early enough to act, when a run will use it up.

The kernel kills a process that uses too much, without a message. What is available (to the container,
where there is one) is read once a step; its slope is the median of the slopes between all pairs of the latest steps, which a few
odd ones do not move. Growth that has ended is none: the newer half of the steps has to grow as well. A warning comes when
memory would last less than the rest of the run, and again each time that what is left has halved.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from statistics import median

from trimtab.base.units import GIB, MIB
from trimtab.model.memory import host_memory
from trimtab.observe.format import duration

SLOPE_WINDOW_STEPS = 32
"""Steps that the slope is taken over."""
MIN_STEPS_FOR_SLOPE = 8
"""Steps before there is a slope: the first ones fill caches."""


class HostWatch:
    """`warn` is called with a line for the user."""

    def __init__(
        self,
        warn: Callable[[str], None],
        read: Callable[[], tuple[int, int]] = host_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warn, self._read, self._clock = warn, read, clock
        self._left: deque[int] = deque(maxlen=SLOPE_WINDOW_STEPS)
        self._times: deque[float] = deque(maxlen=SLOPE_WINDOW_STEPS)
        self._said = float("inf")
        """Steps that memory would have lasted at the latest warning."""

    def end_step(self, steps_to_go: int) -> dict[str, float]:
        """`memory/host_left_gib`, and what a step takes of it: `memory/host_slope_mib_per_step`, once there are enough."""
        _, available = self._read()
        self._left.append(available)
        self._times.append(self._clock())
        metrics = {"memory/host_left_gib": available / GIB}
        if len(self._left) < MIN_STEPS_FOR_SLOPE:
            return metrics
        taken = -slope(self._left)
        lasting = min(taken, -slope(list(self._left)[len(self._left) // 2 :]))
        steps_left = available / lasting if lasting > 0 else float("inf")
        if steps_left < steps_to_go and steps_left <= self._said / 2:
            self._said = steps_left
            seconds = median(b - a for a, b in pairwise(self._times))
            self._warn(
                f"free host memory falls by {lasting / MIB:,.0f} MiB per step and runs out in about {steps_left:,.0f} steps "
                f"({duration(steps_left * seconds)}), before the {steps_to_go:,} to go; {available / GIB:.1f} GiB are left. "
                "Check what reward functions keep in memory, or lower run.reward_workers"
            )
        return metrics | {"memory/host_slope_mib_per_step": taken / MIB}


def slope(values: Sequence[float]) -> float:
    """Change from one value to the next: the median over all pairs (Theil and Sen)."""
    return median((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(values), 2))
