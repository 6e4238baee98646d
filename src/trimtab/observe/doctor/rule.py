"""A rule: a pure function from a run's record to what it saw, or nothing where the run is healthy.

What a rule needs (metrics, steps, settings) is declared, so a rule that cannot judge says so; it never counts as healthy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.observe.doctor.finding import Finding, Kind, Level
from trimtab.observe.doctor.record import Record

SUDDEN_STEPS = 5
"""Values it takes to see a sudden change."""


@dataclass(frozen=True)
class Symptom:
    """What a check saw. `cause` and `remedy` where what was seen says more than the rule does in general."""

    level: Level
    evidence: str
    cause: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class BandSpan:
    """Where a metric is healthy between two steps; None: no limit on that side."""

    first: int
    last: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Band:
    """The healthy values of a metric over a run, for shading a chart."""

    metric: str
    text: str
    spans: tuple[BandSpan, ...]


def steady_band(
    metric: str, text: str, low: float | None = None, high: float | None = None
) -> Callable[[Record], Band]:
    """The same limits all the time."""

    def band(record: Record) -> Band:
        steps = record.steps or [0]
        return Band(metric, text, (BandSpan(steps[0], steps[-1], low, high),))

    return band


@dataclass(frozen=True)
class DoctorRule:
    """When something is wrong, and what to do about it."""

    id: str
    title: str
    unit: str
    healthy: str
    found_when: str
    """The condition, in words; the check is its definition."""
    cause: str
    remedy: str
    kind: Kind
    check: Callable[[Record], Symptom | None]
    needs: tuple[str, ...]
    """Metrics without which it cannot judge."""
    steps: int = 5
    """Values of each of them that it takes to judge."""
    unless: Callable[[Record], str | None] = lambda record: None
    """Why it does not apply to this run; None where it does."""
    sudden: Callable[[Record], Symptom | None] = lambda record: None
    """Finds what happens at once and lasts. It needs fewer values (`SUDDEN_STEPS`), so it judges shorter runs, too."""
    band: Callable[[Record], Band | None] = lambda record: None
    """Where its metric is healthy; None where no limit can be drawn."""

    def not_judged(self, record: Record) -> str | None:
        """Why the rule has nothing to say about this run; None where it can judge."""
        if why := self.unless(record):
            return why
        fewest = min(self.needs, key=lambda name: len(record.values(name)))
        has = len(record.values(fewest))
        if has == 0:
            return f"needs {fewest}"
        return None if has >= self.steps else f"needs {self.steps} values, has {has}"

    def apply(self, record: Record) -> Finding | None:
        """What is found; None where that is nothing, or where it cannot be judged."""
        symptom = None
        if not self.unless(record) and all(len(record.values(name)) >= SUDDEN_STEPS for name in self.needs):
            symptom = self.sudden(record)
        if symptom is None and self.not_judged(record) is None:
            symptom = self.check(record)
        if symptom is None:
            return None
        return Finding(
            rule=self.id,
            level=symptom.level,
            title=self.title,
            unit=self.unit,
            healthy=self.healthy,
            evidence=symptom.evidence,
            cause=symptom.cause or self.cause,
            remedy=symptom.remedy or self.remedy,
            kind=self.kind,
        )
