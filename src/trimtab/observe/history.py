"""What the views know: the metrics of this session so far, and what follows from them (time left, phase shares)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.observe.format import get
from trimtab.observe.timeline import PHASES

ETA_WINDOW = 20
SHOWN_PHASES = (*PHASES, "idle")


def offline_loss(metrics: Mapping[str, Any]) -> str:
    """The loss of a step that learns from given data; empty where it is one of reinforcement learning."""
    return next((name for name in ("sft/loss", "rm/loss") if name in metrics), "")


@dataclass
class History:
    total_steps: int
    step: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the last step."""
    rewards: list[float | None] = field(default_factory=list)
    """Mean reward of each step, or its loss where it is supervised."""
    step_seconds: list[float] = field(default_factory=list)
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Sums over all steps."""
    rollout_parts: dict[str, float] = field(default_factory=dict)
    """Prefill, decode and waiting for environments inside rollout, summed over all steps."""
    last_eval: tuple[int, Mapping[str, Any]] | None = None
    """(step, scores)"""

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.step, self.metrics = step, dict(metrics)
        self.rewards.append(get(metrics, offline_loss(metrics) or "reward/mean"))
        total = get(metrics, "time/total")
        if total is not None:
            self.step_seconds.append(total)
        for name in SHOWN_PHASES:
            seconds = get(metrics, f"time/{name}") or 0.0
            self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        for name, seconds in self.step_rollout_parts.items():
            self.rollout_parts[name] = self.rollout_parts.get(name, 0.0) + seconds

    @property
    def elapsed_s(self) -> float:
        return sum(self.step_seconds)

    @property
    def eta_s(self) -> float | None:
        """Steps left times the mean of recent ones. The first is left out when it can be: it compiles and warms up."""
        recent = (self.step_seconds[1:] or self.step_seconds)[-ETA_WINDOW:]
        return (self.total_steps - self.step) * sum(recent) / len(recent) if recent else None

    @property
    def step_phases(self) -> dict[str, float]:
        """Seconds of each phase in the last step."""
        return {name: get(self.metrics, f"time/{name}") or 0.0 for name in SHOWN_PHASES}

    @property
    def step_rollout_parts(self) -> dict[str, float]:
        """Seconds of rollout's parts in the last step."""
        parts = {name: get(self.metrics, f"rollout/{name}_s") or 0.0 for name in ("prefill", "decode")}
        waited = get(self.metrics, "environment/wait_s")
        return parts if waited is None else {**parts, "environments": waited}
