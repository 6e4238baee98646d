"""Several objectives: is each task's KL where it should be, and is the judge fast enough."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom
from trimtab.observe.format import duration, number, percent
from trimtab.observe.task_names import metric_names

SLOW_REQUEST_S = 6.0
"""A request of a judge that takes longer holds up a step, however many are in flight."""
MAX_WAIT_SHARE = 0.15
MIN_STEPS = 5


def bands(record: Record) -> dict[str, tuple[str, float, float]]:
    """By task with a band: its metric, and the band's ends."""
    observe = record.settings.get("observe")
    stated = observe.get("kl_bands") if isinstance(observe, Mapping) else None
    if not isinstance(stated, Mapping):
        return {}
    names = metric_names([str(task) for task in stated])
    return {
        str(task): (f"policy/task/{names[str(task)]}/kl_ref", float(band[0]), float(band[1]))
        for task, band in stated.items()
        if str(task) in names and _is_band(band)
    }


def _is_band(band: Any) -> bool:
    return isinstance(band, list | tuple) and len(band) == 2 and all(isinstance(end, int | float) for end in band)


def task_kl(record: Record) -> Symptom | None:
    """Too low counts only in the second half of the run: every task starts at 0."""
    late = 2 * max(record.steps, default=0) >= record.setting("learn.steps", 0)
    seen, worst = [], 1.0
    for task, (name, low, high) in bands(record).items():
        recent = record.recent(name)
        now = median(recent) if len(recent) >= MIN_STEPS else None
        if now is None or low <= now <= high or (now < low and not late):
            continue
        side = "above" if now > high else "below"
        seen.append(
            f"{task} {number(now, 4)} nats (median of {record.span(name)}), {side} its band of {low:g} to {high:g}"
        )
        worst = max(worst, now / high)
    if not seen:
        return None
    return Symptom("bad" if worst > 2 else "warn", "; ".join(seen))


def _without_bands(record: Record) -> str | None:
    return None if bands(record) else "no observe.kl_bands"


def judge_names(record: Record) -> list[str]:
    parts = record.settings.get("reward")
    judges = [p for p in parts if isinstance(p, Mapping) and p.get("fn") == "judge"] if isinstance(parts, list) else []
    return [str(part.get("name") or "judge") for part in judges]


def slow_judge(record: Record) -> Symptom | None:
    total = sum(record.recent("time/total"))
    for judge in judge_names(record):
        slowest = record.now(f"reward/{judge}/latency_p95_s") or 0.0
        waited = sum(record.recent(f"reward/{judge}/wait_s")) / total if total else 0.0
        if slowest <= SLOW_REQUEST_S and waited <= MAX_WAIT_SHARE:
            continue
        half = record.now(f"reward/{judge}/latency_p50_s")
        span = record.span(f"reward/{judge}/latency_p95_s")
        seen = (
            f"{judge}: one request in twenty took {duration(slowest)} or more, half of them {duration(half)} (medians of "
            f"{span}); {percent(waited)} of all time is spent waiting for it"
        )
        if slowest <= SLOW_REQUEST_S:
            return Symptom(
                "warn", seen, "requests are quick, but the judge's concurrency is too low for the number of completions"
            )
        return Symptom("warn", seen)
    return None


def _no_judge(record: Record) -> str | None:
    judges = judge_names(record)
    if not judges:
        return "no judge among the rewards"
    needed = [f"reward/{judge}/latency_p95_s" for judge in judges]
    return None if any(len(record.values(name)) >= MIN_STEPS for name in needed) else f"needs {needed[0]}"


RULES = (
    DoctorRule(
        "task_kl",
        "a task's KL is outside its band",
        unit="KL to the reference, nats per token of the task",
        healthy="within the task's observe.kl_bands",
        found_when="the median of the last 20 steps is above the band, or below it in the second half of the run; bad above "
        "twice its upper end",
        cause="above: this task's reward dominates the others, or the policy exploits it. Below: the policy learns nothing "
        "from it",
        remedy="change the weights of the parts, or put them on one scale (a part's `normalize`); change the task's share of "
        "the prompts; change learn.kl.coef or learn.kl.target",
        kind="advice",
        check=task_kl,
        needs=("policy/kl_ref",),
        steps=20,
        unless=_without_bands,
    ),
    DoctorRule(
        "slow_judge",
        "the judge is slow",
        unit="seconds of a request, 95th percentile; share of all time",
        healthy="below 6 s; below 15 % of the time spent waiting for it",
        found_when="the median of the last 20 steps is above 6 s, or the last 20 steps waited longer than that share",
        cause="the endpoint gets more requests than it can serve, the model is large, or its answers are long",
        remedy="lower the judge's max_tokens; use a faster model or more replicas of it; set the judge's concurrency to what "
        "the endpoint serves without slowing down",
        kind="advice",
        check=slow_judge,
        needs=("time/total",),
        steps=MIN_STEPS,
        unless=_no_judge,
    ),
)
