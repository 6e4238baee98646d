"""Stands in for the page data until branch judge has it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from trimtab.observe.doctor.examine import examine
from trimtab.observe.doctor.record import Record
from trimtab.observe.history import SHOWN_PHASES
from trimtab.record.reader import RunReader

GIB = 2**30


def describe(reader: RunReader) -> dict[str, Any]:
    run, now, plan, metrics = reader.run(), reader.now(), reader.plan(), reader.metrics
    settings = dict(reader.settings())
    steps = metrics.steps
    step = int(steps[-1]) if len(steps) else 0
    record = Record(settings, metrics, finished=reader.finished, quiet_s=reader.quiet_s())
    done = examine(record)
    kind = run.get("state") or ("finished" if reader.finished else "running")
    if kind == "running" and time.time() - now.get("at", 0) > 120:
        kind = "quiet"
    totals = metrics.column("time/total")[-20:]
    rows = []
    for name in SHOWN_PHASES:
        values = metrics.column(f"time/{name}")[-20:]
        values = values[np.isfinite(values)]
        if len(values):
            seconds = float(np.median(values))
            planned = (plan.get("step_seconds") or {}).get(name)
            rows.append(
                {"name": name, "seconds": seconds, "share": seconds / float(np.nanmedian(totals)), "planned": planned}
            )
    memory = []
    for phase in plan.get("phases") or []:
        _, peaks = metrics.points(f"memory/{phase['name']}_peak_gib")
        memory.append(
            {
                "name": phase["name"],
                "predicted": phase["allocated_bytes"],
                "measured": peaks[-1] * GIB if len(peaks) else None,
            }
        )
    level = "bad" if any(f.level == "bad" for f in done.findings) else "warn" if done.findings else "ok"
    parts = [
        {"id": "state", "text": f"The run is {kind}."},
        {"id": "learning", "text": "It learns: held-out score 36% to 71%."},
        {"id": "bound", "text": "Rollout takes most of a step, waiting for its longest responses."},
        {"id": "next", "text": done.findings[0].remedy if done.findings else "nothing to change"},
    ]
    return {
        "name": run.get("name") or reader.folder.name,
        "stage": run.get("stage") or "rl",
        "state": {
            "kind": kind,
            "text": kind,
            **{k: now.get(k) for k in ("phase", "since", "done", "total", "unit")},
            "left_s": 300,
        },
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
        "events": reader.events(),
    }
