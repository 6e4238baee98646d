"""Warns when steps teach nothing: in no group do the rewards differ.

Such a run looks busy and costs hours, so the warning comes after a few steps, and is repeated more and more rarely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.observe.format import get, number

WARN_AFTER_STEPS = (3, 30, 300)
"""Numbers of steps in a row without signal at which the warning comes."""
NO_SIGNAL = "reward/zero_std_groups"


def signal_share(metrics: Mapping[str, Any]) -> float | None:
    """Share of groups whose samples differ in reward; None where samples are not compared within their groups."""
    without = get(metrics, NO_SIGNAL)
    return None if without is None else 1.0 - without


class SignalWatch:
    """Counts steps without signal."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def saw(self, metrics: Mapping[str, Any]) -> str | None:
        """What to tell after this step; None: nothing."""
        share = signal_share(metrics)
        if share is None:
            return None
        self._in_a_row = self._in_a_row + 1 if share <= 0 else 0
        if self._in_a_row not in WARN_AFTER_STEPS:
            return None
        return (
            f"no group had signal in the last {self._in_a_row} steps: all samples of a prompt get the same reward (mean "
            f"{number(get(metrics, 'reward/mean'))}), so the policy learns nothing. Read RUN/samples; check the reward, choose "
            "prompts that the model solves sometimes, or raise learn.samples_per_prompt or learn.sampling.temperature"
        )
