"""Prompts by difficulty (`data.curriculum: pass_rate`): those that the policy always or never solves come less often.

The order is the stream's own. At its turn a prompt that was sampled before, and of whose samples a share p succeeded, is kept
with probability max(1/8, 4 p (1 - p)), and else passed over until its next turn: rates of 1/2 are always kept, and no prompt is
ever lost. A prompt without a rate is kept.

Guarantee: what is drawn is a function of the seed, the position in the stream and the rates. Of a batch that is sampled k steps
ahead (`learn.staleness`) only rates of steps before s - k count, which are there however fast anything is. So a run that resumes
draws the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LEAST = 1 / 8
"""The least probability of keeping a prompt."""
SALT = 0x9E3779B97F4A7C15
"""Tells these random numbers from those of the order."""

Rates = dict[str, list[list[float]]]
"""By row, as text: [step, share of samples that succeeded], the latest last. Plain data, for a checkpoint."""


def note_rate(rates: Rates, row: int, step: int, rate: float, staleness: int) -> None:
    """Remember how a row's samples did in a step; older rates than any batch may still ask for are forgotten."""
    known = rates.setdefault(str(row), [])
    known.append([step, rate])
    while len(known) > 1 and known[1][0] < step - staleness:
        known.pop(0)


def keeps(rates: Rates, seed: int, step: int, staleness: int) -> Callable[[int, int], bool]:
    """Whether the row at a position of the stream is kept for the batch of this step."""

    def keep(row: int, position: int) -> bool:
        known = [rate for at, rate in tuple(rates.get(str(row), ())) if at < step - staleness]
        return not known or _drawn(seed, position) < probability(known[-1])

    return keep


def probability(rate: float) -> float:
    return max(LEAST, 4 * rate * (1 - rate))


def _drawn(seed: int, position: int) -> float:
    """A number from 0 to 1, of the seed and the position alone."""
    raw = np.random.Philox(key=np.array([seed ^ SALT, position], dtype=np.uint64)).random_raw()
    return int(raw) / 2.0**64
