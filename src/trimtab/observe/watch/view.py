"""What a frame of `trimtab watch` is drawn from. Every field may be missing: folders of earlier versions have less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.observe.visible import visible
from trimtab.record.columns import MetricTable

ENDED = ("finished", "failed", "stopped")
MARKS = {"ok": ("✓", "green"), "warn": ("▲", "yellow"), "bad": ("✗", "red"), "unknown": ("○", "dim")}
"""A level's shape and colour: nobody needs the colour to tell them apart."""
STATE_LEVEL = {
    "finished": "ok",
    "running": "ok",
    "quiet": "warn",
    "failed": "bad",
    "stopped": "warn",
    "starting": "unknown",
}


@dataclass(frozen=True)
class RunView:
    """A run as it is now: what a page of it shows (docs/architecture.md), and its metrics."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """State, facts, verdict, phases, memory, findings, events."""
    metrics: MetricTable = field(default_factory=MetricTable)
    last: Mapping[str, float] = field(default_factory=dict)
    """The newest value of each metric."""
    now: float = 0.0
    """Unix seconds."""

    @property
    def name(self) -> str:
        return visible(str(self.run.get("name") or "run"))

    @property
    def stage(self) -> str:
        return str(self.run.get("stage") or "rl")

    @property
    def state(self) -> Mapping[str, Any]:
        return mapping(self.run.get("state"))

    @property
    def facts(self) -> Mapping[str, Any]:
        return mapping(self.run.get("facts"))

    @property
    def has_ended(self) -> bool:
        return self.state.get("kind") in ENDED

    def rows(self, key: str) -> Sequence[Mapping[str, Any]]:
        """A list of objects, such as findings and events."""
        found = self.run.get(key)
        return [row for row in found if isinstance(row, Mapping)] if isinstance(found, Sequence) else []


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def newest_values(metrics: MetricTable) -> dict[str, float]:
    """The last finite value of each metric."""
    found = {}
    for name in metrics.names:
        _, values = metrics.points(name)
        if len(values):
            found[name] = float(values[-1])
    return found
