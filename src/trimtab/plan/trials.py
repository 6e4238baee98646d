"""The trials of `trimtab tune` and their results. In a module of its own, so that plans can be read without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One size of one key: tokens a second (None: it did not fit), and the most bytes allocated (None: there is no meter)."""

    key: str
    value: int
    rate: float | None
    peak: int | None = None


@dataclass(frozen=True)
class Tuned:
    """The fastest sizes found, and all that were tried."""

    token_budget: int
    max_sequences: int
    trials: tuple[Trial, ...]
