"""How lengths, rewards, advantages and groups of a step are spread: a line of RUN/distributions.jsonl. Pure.

Edges depend on the limits of a run, or are round numbers around what was seen, so that they seldom change from step to step and
histograms of many steps can be laid side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

LENGTH_BINS, VALUE_BINS = 64, 32


def distributions(
    step: int,
    lengths: Sequence[int],
    longest: int,
    rewards: Sequence[float],
    advantages: Sequence[float],
    rights: Sequence[int] | None,
    samples: int,
) -> dict[str, Any]:
    """`longest`: tokens that a completion may have. `rights`: how many completions of each group are right; None where nothing
    says so. `samples`: completions of a group. Without those that there is nothing to say of."""
    found: dict[str, Any] = {"step": step, "lengths": histogram(lengths, length_edges(longest))}
    if kept := [value for value in rewards if math.isfinite(value)]:
        found["rewards"] = histogram(kept, value_edges(kept))
    if rights is not None:
        counts = np.bincount(np.clip(np.asarray(rights, dtype=np.int64), 0, samples), minlength=samples + 1)
        found["groups"] = {"right": counts.tolist()}
    if kept := [value for value in advantages if math.isfinite(value)]:
        most = max(map(abs, kept))
        found["advantages"] = histogram(kept, value_edges([-most, most]))
    return found


def length_edges(longest: int) -> list[float]:
    """Each bin is as much longer than the one before, from 1 token to more than there may be."""
    return [_short(edge) for edge in np.geomspace(1.0, max(2, longest) + 1.0, LENGTH_BINS + 1)]


def value_edges(values: Sequence[float]) -> list[float]:
    """Equal bins from a round number below all values to one above; 0 is always among them."""
    low, high = min(0.0, *values), max(0.0, *values)
    low, high = -_round_up(-low), _round_up(high)
    if low == high:
        high = 1.0
    return [_short(edge) for edge in np.linspace(low, high, VALUE_BINS + 1)]


def histogram(values: Sequence[float], edges: Sequence[float]) -> dict[str, Any]:
    """Every value is counted, those outside in the first or the last bin."""
    inside = np.clip(np.asarray(values, dtype=np.float64), edges[0], edges[-1])
    counts, _ = np.histogram(inside, bins=np.asarray(edges))
    return {"edges": list(edges), "counts": counts.tolist()}


def _round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 0.0
    base = 10.0 ** math.floor(math.log10(value))
    return next((factor * base for factor in (1, 2, 5) if value <= factor * base * (1 + 1e-9)), 10 * base)


def _short(value: float) -> float:
    """With five digits, which keeps the file small."""
    return float(f"{value:.5g}")
