"""What to say of a run first: its state, whether it learns, what bounds its speed, and what to do next. Pure; without torch.

    verdict = judge(look_at(folder))
    print(verdict.text)

Every part has its evidence (metric, value, steps) and the chart to look at. A gain is told only where the planner computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trimtab.observe.bound import Bound, bound_of
from trimtab.observe.charts import chart_of
from trimtab.observe.doctor.examine import MIN_STEPS_TO_JUDGE
from trimtab.observe.doctor.finding import Finding, worst
from trimtab.observe.doctor.record import RECENT_STEPS
from trimtab.observe.gains import Outcome, best_safe_change, gain_words, outcome_of
from trimtab.observe.learned import Learning, learning_of
from trimtab.observe.look import RunLook
from trimtab.observe.state import StateNow
from trimtab.observe.waste import waste_of

Level = Literal["ok", "warn", "bad", "unknown"]
ORDER: tuple[Level, ...] = ("ok", "unknown", "warn", "bad")
WAIT = "A run has to have five steps before it can be judged."
CHARTS = {"reward_share": "time/reward", "rollout_share": "time/rollout"}


@dataclass(frozen=True)
class Evidence:
    """A number, and the steps that it is of."""

    metric: str
    value: float | None
    text: str
    first: int | None
    last: int | None


@dataclass(frozen=True)
class VerdictPart:
    """`state`, `learning`, `bound` or `next`."""

    id: str
    text: str
    level: Level
    evidence: tuple[Evidence, ...] = ()
    chart: str | None = None
    key: str | None = None
    """A line of config to copy."""
    gain: str | None = None


@dataclass(frozen=True)
class Verdict:
    level: Level
    parts: tuple[VerdictPart, ...]
    state: StateNow
    learning: Learning
    bound: Bound | None = field(default=None)

    def part(self, id: str) -> VerdictPart | None:
        return next((part for part in self.parts if part.id == id), None)

    @property
    def text(self) -> str:
        """The sentence: all parts but the advice."""
        return " ".join(part.text for part in self.parts if part.id != "next")

    def as_json(self) -> dict[str, Any]:
        return {"level": self.level, "parts": [asdict(part) for part in self.parts]}


Ask = Callable[[RunLook, list[str]], Outcome | None]


def judge(look: RunLook, ask: Ask | None = outcome_of) -> Verdict:
    """`ask`: what tells the gain of a change; None: gains are not told."""
    state, findings = look.state, {finding.rule: finding for finding in look.done.findings}
    learning = learning_of(look, findings)
    bound = bound_of(look.record, findings)
    enough = len(look.record.steps) >= MIN_STEPS_TO_JUDGE
    parts = [_state(look, state, learning, enough)]
    if learning.text:
        chart = chart_of(learning.metric, look.stage) if learning.metric else None
        parts.append(VerdictPart("learning", learning.text, learning.level, _evidence(look, learning.metrics), chart))
    if bound is not None:
        parts.append(_bound(look, bound))
    advice = _next(look, state, bound, enough, ask)
    parts.append(advice)
    return Verdict(_worst(parts), tuple(parts), state, learning, bound)


def _worst(parts: list[VerdictPart]) -> Level:
    return max((part.level for part in parts), key=ORDER.index)


def _state(look: RunLook, state: StateNow, learning: Learning, enough: bool) -> VerdictPart:
    """What became of the run, or how it is."""
    text = state.text[0].upper() + state.text[1:] + "."
    if state.kind == "failed":
        return VerdictPart("state", text, "bad")
    if state.kind == "quiet":
        return VerdictPart("state", text, "warn", chart="step_time")
    if state.kind == "starting":
        return VerdictPart("state", f"Starting: {state.text}.", "unknown")
    if not enough:
        steps = len(look.record.steps)
        return VerdictPart("state", f"{text} Too few steps to judge: {steps} of {MIN_STEPS_TO_JUDGE}.", "unknown")
    found, level = look.done.findings, worst(look.done.findings)
    ended = f"Stopped at step {state.step}, " if state.kind == "stopped" else ""
    if level == "bad":
        return VerdictPart(
            "state", _capital(f"{ended}not healthy: {found[0].title}."), "bad", chart=_chart(look, found[0])
        )
    if level == "warn":
        count = f"{len(found)} warnings" if len(found) > 1 else "one warning"
        return VerdictPart("state", _capital(f"{ended}{count}: {_first(look, found).title}."), "warn")
    so_far = " so far" if state.live else ""
    words = f"{ended}healthy{so_far}: it learned the task." if learning.learned else f"{ended}healthy{so_far}."
    return VerdictPart("state", _capital(words), "ok")


def _first(look: RunLook, findings: list[Finding]) -> Finding:
    """The first of the worst; what the bound's cause says comes before what only says how long a phase is."""
    bound = bound_of(look.record, {finding.rule: finding for finding in findings})
    if bound is not None and bound.finding is not None and bound.finding.level == findings[0].level:
        return bound.finding
    return findings[0]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _bound(look: RunLook, bound: Bound) -> VerdictPart:
    cause = bound.cause
    metrics = cause.metrics if cause else (f"time/{bound.phase}",)
    found = _evidence(look, tuple(dict.fromkeys((*metrics, f"time/{bound.phase}"))))
    known = [metric for metric in metrics if look.record.values(metric)]
    chart = chart_of(known[0], look.stage) if known and cause else "phases"
    return VerdictPart(
        "bound", bound.words, "warn" if cause else "ok", found, chart, cause.key(look.record) if cause else None
    )


def _next(look: RunLook, state: StateNow, bound: Bound | None, enough: bool, ask: Ask | None) -> VerdictPart:
    """The worst finding's remedy; else the safe change with the largest gain; else the largest waste, as a hint."""
    if state.kind == "failed":
        how = (
            f"Continue it with `{state.resume}`."
            if state.resume
            else "Read its output, and start it again with --resume."
        )
        return VerdictPart("next", how, "ok", key=state.resume)
    if state.kind == "quiet":
        return VerdictPart("next", "See whether its process still runs; if not, continue it with --resume.", "ok")
    if not enough:
        return VerdictPart("next", WAIT if state.live else "There is too little to advise on.", "unknown")
    findings = look.done.findings
    if findings:
        finding = _first(look, findings)
        key, gain = None, None
        if bound is not None and bound.finding is finding and bound.cause is not None:
            key = bound.cause.key(look.record)
            gain = _gain(look, key, ask) if bound.cause.safe else None
        return VerdictPart(
            "next", f"{_capital(finding.remedy)}.", "ok", chart=_chart(look, finding), key=key, gain=gain
        )
    if ask is not None and (best := best_safe_change(look)) is not None:
        key = best.overrides[0].replace("=", ": ", 1)
        return VerdictPart(
            "next", f"{_capital(best.text)}: a step would be shorter.", "ok", key=key, gain=gain_words(best)
        )
    waste = waste_of(look.record)
    if waste is not None:
        return VerdictPart(
            "next", waste.text, "ok", _evidence(look, (waste.metric,)), chart_of(waste.metric, look.stage), waste.key
        )
    return VerdictPart("next", "Nothing to change.", "ok")


def _gain(look: RunLook, key: str | None, ask: Ask | None) -> str | None:
    if key is None or ask is None:
        return None
    return gain_words(ask(look, [key.replace(": ", "=", 1)]))


def _chart(look: RunLook, finding: Finding) -> str | None:
    from trimtab.observe.doctor.rules import RULES

    needs = next((rule.needs for rule in RULES if rule.id == finding.rule), ())
    metrics = [CHARTS[finding.rule]] if finding.rule in CHARTS else needs
    return next((chart for metric in metrics if (chart := chart_of(metric, look.stage))), None)


def _evidence(look: RunLook, metrics: tuple[str, ...]) -> tuple[Evidence, ...]:
    """The recent level of each metric that has one."""
    found = []
    for metric in metrics:
        points = look.record.points(metric)[-RECENT_STEPS:]
        if points:
            value, text = look.record.now(metric), f"median of {look.record.span(metric)}"
            found.append(Evidence(metric, value, text, points[0][0], points[-1][0]))
    return tuple(found)
