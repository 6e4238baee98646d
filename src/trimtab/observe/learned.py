"""Is it learning: what the held-out score, the reward or the loss did, in a sentence and in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trimtab.observe.doctor.finding import Finding
from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rules.common import learned, reward_falls, reward_rises
from trimtab.observe.format import number
from trimtab.observe.look import RunLook

Level = Literal["ok", "warn", "bad", "unknown"]
RULES = (
    "reward_falls", "reward_flat", "eval_behind", "eval_past_best", "not_finite", "entropy_collapse", "entropy_explosion",
    "length_collapses", "length_grows",
)  # fmt: skip
"""Rules whose finding is one about learning."""
SCORES = (
    ("eval/pass@1", "Held-out accuracy", "share", True),
    ("eval/score", "The held-out score", "", True),
    ("eval/accuracy", "Held-out accuracy", "share", True),
    ("eval/loss", "The held-out loss", "nats", False),
)
"""Metric, what it is called, its unit, and whether more is better."""
OBJECTIVES = (
    ("reward/mean", "The reward", "", True),
    ("rm/accuracy", "Accuracy in training", "share", True),
    ("sft/loss", "The loss", "nats", False),
    ("rm/loss", "The loss", "nats", False),
)


@dataclass(frozen=True)
class Learning:
    """`first` and `last` with the error of `last`, where that is known."""

    text: str
    level: Level
    metric: str | None = None
    first: float | None = None
    last: float | None = None
    error: float | None = None
    unit: str = ""
    held_out: bool = False
    learned: bool = False
    steps: tuple[int, int] | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        return () if self.metric is None else (self.metric, *(("eval/stderr",) if self.error else ()))


def show(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" if unit == "share" else number(value)


def learning_of(look: RunLook, findings: Mapping[str, Finding]) -> Learning:
    record = look.record
    for metric, name, unit, more in SCORES:
        points = record.points(metric)
        if len(points) >= 2:
            return _held_out(record, metric, name, unit, more, findings)
    for metric, name, unit, more in OBJECTIVES:
        if record.values(metric):
            return _objective(record, metric, name, unit, more, findings)
    return Learning("", "unknown")


def _level(findings: Mapping[str, Finding]) -> Level | None:
    found = [findings[rule].level for rule in RULES if rule in findings]
    return "bad" if "bad" in found else "warn" if found else None


def _held_out(
    record: Record, metric: str, name: str, unit: str, more: bool, findings: Mapping[str, Finding]
) -> Learning:
    (first_at, first), (last_at, last) = record.points(metric)[0], record.points(metric)[-1]
    errors = record.values("eval/stderr") if metric in ("eval/pass@1", "eval/score") else []
    error = errors[-1] if errors else None
    change = last - first
    clear = abs(change) > 2 * 2**0.5 * (error if error is not None else 0.02 * max(abs(first), 1e-9))
    a, b = show(first, unit), show(last, unit)
    if not clear:
        text, level = f"{name} is {b}, as it was at the start ({a}): no difference beyond its error.", "unknown"
    elif change > 0:
        text, level = f"{name} rose from {a} to {b}.", "ok" if more else "warn"
    else:
        text, level = f"{name} fell from {a} to {b}.", "warn" if more else "ok"
    judged: Level = _level(findings) or ("ok" if level == "unknown" and _fine(record) else _as_level(level))
    return Learning(text, judged, metric, first, last, error, unit, True, learned(record), (first_at, last_at))


def _fine(record: Record) -> bool:
    return learned(record)


def _as_level(level: str) -> Level:
    known: dict[str, Level] = {"ok": "ok", "warn": "warn", "bad": "bad"}
    return known.get(level, "unknown")


def _objective(
    record: Record, metric: str, name: str, unit: str, more: bool, findings: Mapping[str, Finding]
) -> Learning:
    points = record.points(metric)
    first, last = record.early(metric), record.now(metric) if len(points) >= 20 else points[-1][1]
    line = record.trend(metric)
    a, b = show(first, unit), show(last, unit)
    rises = reward_rises(record) if metric == "reward/mean" else line.rises()
    falls = reward_falls(record) if metric == "reward/mean" else line.falls()
    without = " There is no held-out set to compare with." if metric in ("reward/mean", "sft/loss") else ""
    level: Level = "unknown"
    if len(points) < 20:
        text = f"{name} is {b} after {len(points)} step{'s' * (len(points) != 1)}: too early to see a trend."
    elif rises or falls:
        text = f"{name} {'rose' if rises else 'fell'} from {a} to {b}.{without}"
        level = "ok" if rises == more else "bad"
    else:
        text = f"{name} is {b}, and neither rises nor falls clearly.{without}"
    steps = (points[0][0], points[-1][0])
    return Learning(text, _level(findings) or level, metric, first, last, None, unit, False, learned(record), steps)
