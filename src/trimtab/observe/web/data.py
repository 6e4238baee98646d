"""Everything that the pages show of a run, as JSON: for the report all of it, for the server a part at a time. Without torch.

    document = report_document([look_at(folder)])

Every part is optional: what a folder does not hold is missing and, where a key would turn it on, said so in `missing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.base.errors import TrimtabError
from trimtab.observe.charts import catalogue
from trimtab.observe.gains import single_changes
from trimtab.observe.look import RunLook
from trimtab.observe.verdict import judge
from trimtab.observe.web import sections
from trimtab.observe.web.compare import compare
from trimtab.observe.web.earlier import looks_back
from trimtab.observe.web.encode import clean, column
from trimtab.observe.web.facts import head, run_id
from trimtab.observe.web.findings import findings_of
from trimtab.observe.web.histograms import distributions, evaluations
from trimtab.observe.web.private import make_private
from trimtab.observe.web.questions import questions
from trimtab.observe.web.samples import samples
from trimtab.observe.web.settings import choices_of, config
from trimtab.observe.web.traces import trace
from trimtab.record.jsonl import finite
from trimtab.record.reader import read_object

VERSION = 1
PROFILE = "profile"


def report_document(
    looks: Sequence[RunLook], private: bool = False, now: float | None = None, changes: bool = True
) -> dict[str, Any]:
    """The one document of a report, of one run or of several."""
    taken: set[str] = set()
    ids = [run_id(look.name if not private else look.folder.name, taken) for look in looks]
    runs = []
    for id, look in zip(ids, looks):
        run = run_data(look, id, changes=changes)
        runs.append(make_private(run, _host(look)) if private else run)
    found = compare(list(zip(ids, looks))) if len(looks) > 1 else None
    if found is not None and private:
        found = make_private(found | {"state": {"kind": ""}}, None)
        del found["state"], found["name"]
    names = sorted({name for look in looks for name in look.reader.metrics.names})
    return {
        "version": VERSION,
        "written": now if now is not None else time.time(),
        "mode": "report",
        "catalogue": catalogue(names),
        "runs": runs,
        "compare": found,
    }


def run_data(look: RunLook, id: str | None = None, whole: bool = True, changes: bool = True) -> dict[str, Any]:
    """Run: all that the pages show. `whole`: with columns, samples, trace and what single changes would take, which the server
    hands out by themselves."""
    verdict = judge(look)
    found: dict[str, Any] = head(look, id) | {
        "verdict": verdict.as_json(),
        "questions": questions(look, verdict),
        "starts": sections.starts(look),
        "not_finite": sections.not_finite(look),
        "bands": sections.bands(look),
        "smoothing": sections.smoothing(look),
        "phases": sections.phases(look),
        "memory": sections.memory(look),
        "funnel": sections.funnel(look),
        "findings": findings_of(look.done.findings),
        "plan": _plan(look, whole and changes),
        "config": config(look),
        "events": _part(look, sections.events, []),
        "distributions": _part(look, distributions, None),
        "evaluations": _part(look, evaluations, {"steps": [], "results": None}),
        "profile": _profile(look.folder),
    }
    if whole:
        table = look.reader.metrics
        found["steps"] = column(table.steps)
        found["columns"] = {name: column(table.column(name)) for name in table.names}
        found["samples"] = _part(look, samples, {"index": [], "rows": {}, "left_out": 0, "total": 0})
        found["trace"] = trace(look.folder)
        found["earlier"] = looks_back(look)
    found["limit_tokens"] = look.record.setting("learn.max_new_tokens", 0) or None
    found["missing"] = sections.missing(look, _has(look, found))
    found["damaged"] = damaged(look)
    cleaned: dict[str, Any] = clean(found)
    return cleaned


def _part(look: RunLook, make: Callable[[RunLook], Any], otherwise: Any) -> Any:
    """A part of the page; a file that cannot be read leaves it empty, and is named in `damaged`."""
    try:
        return make(look)
    except (TrimtabError, OSError):
        return otherwise


def _plan(look: RunLook, changes: bool) -> dict[str, Any] | None:
    plan = look.plan
    if not plan:
        return None
    seconds = plan.get("step_seconds")
    offers = plan.get("offers")
    phases = [phase for phase in plan.get("phases") or () if isinstance(phase, dict)]
    key = "host_bytes" if plan.get("device") == "cpu" else "device_bytes"
    return {
        "choices": choices_of(look),
        "offers": offers if isinstance(offers, list) else [],
        "changes": [outcome.as_json() for outcome in single_changes(look)] if changes else [],
        "assumed": plan.get("assumed_lengths"),
        "profile": plan.get("profile"),
        "step_seconds": finite(seconds.get("total")) if isinstance(seconds, dict) else None,
        "peak_bytes": max((known for phase in phases if (known := finite(phase.get(key)))), default=None),
    }


def _profile(folder: Path) -> dict[str, Any] | None:
    kernels, memory = read_object(folder / PROFILE / "kernels.json"), read_object(folder / PROFILE / "memory.json")
    if not kernels and not memory:
        return None
    return {
        "kernels": kernels.get("kernels"),
        "gaps": kernels.get("gaps"),
        "steps": kernels.get("steps"),
        "trace": kernels.get("trace"),
        "memory": memory or None,
    }


def _has(look: RunLook, found: dict[str, Any]) -> dict[str, bool]:
    return {
        "evaluation": bool(found["evaluations"]["steps"]),
        "samples": bool(found["samples"]["index"]) if "samples" in found else (look.folder / "samples").is_dir(),
        "trace": bool(found["trace"]) if "trace" in found else (look.folder / "trace.json").is_file(),
        "distributions": bool(found["distributions"]),
        "plan": bool(look.plan),
        "events": bool(found["events"]),
        "profile": bool(found["profile"]),
    }


def damaged(look: RunLook) -> list[dict[str, Any]]:
    """Lines and files that could not be read."""
    lines = [*look.reader.damaged, *look.reader.damaged_elsewhere]
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            file = str(line.path.relative_to(look.folder))
        except ValueError:
            file = line.path.name
        found.append({"file": file, "line": line.line, "text": line.what})
    for name in ("run.json", "now.json", "plan.json"):
        path = look.folder / name
        if path.exists() and not read_object(path):
            found.append({"file": name, "line": None, "text": "is not a JSON object"})
    if not look.settings:
        found.append({"file": "config.yaml", "line": None, "text": "holds no settings that can be read"})
    return found


def _host(look: RunLook) -> str | None:
    host = look.run.get("host")
    return host if isinstance(host, str) and len(host) > 2 else None
