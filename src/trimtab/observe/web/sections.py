"""Parts of a run's page that come from metrics and the plan: phases, memory, useful work, bands, what is missing."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import numpy as np

from trimtab.base.units import GIB
from trimtab.observe.bound import PHASES
from trimtab.observe.doctor.rules import RULES
from trimtab.observe.doctor.rules.common import total
from trimtab.observe.look import RunLook
from trimtab.record.jsonl import finite

PARTS = {
    "rollout": (
        ("prefill", "rollout/prefill_s"),
        ("decode", "rollout/decode_s"),
        ("tail of decode", "rollout/tail_s"),
        ("waiting for environments", "environment/wait_s"),
    ),
    "update": (
        ("forward and backward", "update/forward_backward_s"),
        ("optimizer", "update/optimizer_s"),
        ("waiting for offload", "update/offload_wait_s"),
    ),
    "checkpoint": (("training waits", "checkpoint/wait_s"), ("being written", "checkpoint/write_s")),
}
MEMORY_EVENTS = ("recovery", "budget", "engine", "rank")


def phases(look: RunLook) -> dict[str, Any]:
    """Medians of all steps but the first, which compiles; a phase that most steps do not have shows its mean."""
    record = look.record
    planned = look.plan.get("step_seconds")
    planned = planned if isinstance(planned, dict) else {}
    totals = _without_first(record.values("time/total"))
    whole = sum(totals)
    rows: list[dict[str, Any]] = []
    for name in PHASES:
        values = _without_first(record.values(f"time/{name}"))
        if not values or not sum(values):
            continue
        seconds = median(values) or fmean(values)
        plan = finite(planned.get(name))
        rows.append(
            {
                "name": name,
                "seconds": seconds,
                "share": sum(values) / whole if whole else 0.0,
                "planned": plan or None,
                "against_plan": seconds / plan - 1 if plan else None,
                "parts": [
                    {"name": part, "seconds": median(found)}
                    for part, metric in PARTS.get(name, ())
                    if (found := _without_first(record.values(metric))) and median(found) > 0
                ],
            }
        )
    rows.sort(key=lambda row: -float(row["seconds"]))
    return {
        "rows": rows,
        "median_of": len(totals),
        "planned_total": finite(planned.get("total")),
        "measured_total": median(totals) if totals else None,
    }


def _without_first(values: list[float]) -> list[float]:
    return values[1:] or values


def memory(look: RunLook) -> dict[str, Any]:
    """For each phase the components of the plan, what was predicted of the allocator, and what was measured."""
    plan, record = look.plan, look.record
    host = plan.get("device") == "cpu" or not record.on_cuda
    rows = []
    listed = plan.get("phases")
    for phase in listed if isinstance(listed, list) else ():
        if not isinstance(phase, dict):
            continue
        name = str(phase.get("name"))
        predicted = finite(phase.get("host_bytes" if host else "allocated_bytes"))
        values = record.recent(f"memory/{name}_peak_gib")
        measured = max(values) * GIB if values else None
        rows.append(
            {
                "name": name,
                "components": phase.get("host_components" if host else "components") or {},
                "predicted": predicted,
                "measured": measured,
                "left_out": max(0.0, measured - predicted) if measured is not None and predicted is not None else None,
                "binds": name == plan.get("binding_phase"),
            }
        )
    limit = plan.get("limit")
    limits = limit if isinstance(limit, dict) else {}
    return {
        "unit_bytes": 1,
        "limit": finite(limits.get("host" if host else "device")),
        "device": finite(plan.get("host_memory" if host else "device_memory")),
        "phases": rows,
        "host": host,
        "events": [event for event in events(look) if event["kind"] in MEMORY_EVENTS],
    }


def events(look: RunLook) -> list[dict[str, Any]]:
    """What happened, in order."""
    found = []
    for event in look.events:
        step = event.get("step")
        found.append(
            {
                "at": finite(event.get("at")),
                "step": step if type(step) is int else None,
                "level": str(event.get("level") or "info"),
                "kind": str(event.get("kind") or "note"),
                "text": str(event.get("text") or ""),
            }
        )
    return found


def funnel(look: RunLook) -> list[dict[str, Any]]:
    """Samples of the last steps, from being sampled to teaching something."""
    record = look.record
    sampled = total(record, "run/samples")
    if look.stage != "rl" or not sampled:
        return []
    failed = total(record, "reward/failed") + total(record, "environment/failed")
    trained = total(record, "run/samples_trained") if record.values("run/samples_trained") else sampled - failed
    silent = record.mean("reward/zero_std_groups")
    steps = [("sampled", sampled), ("with a reward", max(0.0, sampled - failed)), ("trained", trained)]
    if silent is not None:
        steps.append(("in groups with signal", min(trained, sampled * (1 - silent))))
    return [{"name": name, "count": round(count)} for name, count in steps]


def bands(look: RunLook) -> dict[str, Any]:
    """Healthy values by metric, from the doctor's rules."""
    found: dict[str, Any] = {}
    for rule in RULES:
        band = None if rule.unless(look.record) else rule.band(look.record)
        if band is None or band.metric in found or not look.record.values(band.metric):
            continue
        spans = [{"from": s.first, "to": s.last, "low": s.low, "high": s.high} for s in band.spans]
        found[band.metric] = {"text": band.text, "spans": spans}
    return found


def smoothing(look: RunLook) -> dict[str, int]:
    """Steps that a smoothed line is the mean of: about a tenth of the run; none where there are too few."""
    found = {}
    for name in look.reader.metrics.names:
        steps = int(np.isfinite(look.reader.metrics.column(name)).sum())
        if steps >= 5:
            found[name] = 2 * max(1, steps // 20) + 1
    return found


def starts(look: RunLook) -> list[int]:
    """The first step of each start after the first."""
    steps, numbers = look.reader.metrics.points("run/start")
    changed = [int(step) for step, before, after in zip(steps[1:], numbers, numbers[1:]) if after != before]
    if changed:
        return changed
    listed = look.run.get("starts")
    firsts = [start.get("step") for start in listed if isinstance(start, dict)] if isinstance(listed, list) else []
    return sorted({step for step in firsts[1:] if type(step) is int})


def not_finite(look: RunLook) -> dict[str, list[int]]:
    """Steps in which a metric was written, but as no number."""
    table = look.reader.metrics
    found = {}
    for name in table.names:
        steps = table.steps[table.written(name) & np.isnan(table.column(name))]
        if len(steps):
            found[name] = [int(step) for step in steps]
    return found


def missing(look: RunLook, has: dict[str, bool]) -> list[dict[str, str]]:
    """What a run has no data of, and which key turns it on. `has`: evaluation, samples, trace, distributions, plan."""
    words = {
        "evaluation": "There is no held-out score: set data.eval, and observe.eval_every for one on the way.",
        "samples": "No samples were kept: set observe.samples_every to more than 0.",
        "trace": "There is no trace.json: this run was started by a version that did not write one, or it was moved away.",
        "distributions": "There are no distributions: runs of this version write distributions.jsonl.",
        "plan": "There is no plan.json, so nothing can be compared with the plan.",
        "events": "There are no events: runs of this version write events.jsonl.",
        "profile": "No step was profiled: start the run with --profile-steps 3:5.",
    }
    sampled = ("samples", "distributions") if look.stage == "rl" else ()
    asked = ("evaluation", *sampled, "trace", "plan", "events", "profile")
    return [{"what": what, "text": words[what]} for what in asked if not has.get(what)]
