"""Several runs side by side: their results, the keys that differ, and which of them differ in nothing but the seed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median, stdev
from typing import Any

from trimtab.observe.learned import learning_of
from trimtab.observe.look import RunLook
from trimtab.observe.web.facts import facts, peak_gib
from trimtab.observe.web.settings import flat

Measure = tuple[float | None, float]
"""A value and its standard error."""
ORDER = ("learn.", "model.", "data.", "reward.", "environment.", "eval.", "run.", "observe.")
IGNORED = ("observe.dir",)
SEED = "learn.seed"
VERSIONS = ("trimtab", "python", "torch", "transformers")


def compare(runs: Sequence[tuple[str, RunLook]]) -> dict[str, Any]:
    looks = [look for _, look in runs]
    settings = [dict(flat(look.settings)) for look in looks]
    keys = list(dict.fromkeys(key for each in settings for key in each if key not in IGNORED))
    differ = [key for key in keys if len({repr(each.get(key)) for each in settings}) > 1]
    differ.sort(key=lambda key: next((place for place, part in enumerate(ORDER) if key.startswith(part)), len(ORDER)))
    return {
        "runs": [id for id, _ in runs],
        "table": _table(looks),
        "differ": [{"key": key, "values": [each.get(key) for each in settings]} for key in differ],
        "equal": len(keys) - len(differ),
        "versions": _versions(looks),
        "bands": _seeds(runs, settings),
    }


def _table(looks: Sequence[RunLook]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(label: str, unit: str, measure: Callable[[RunLook], Measure], more_is_better: bool | None) -> None:
        measured = [measure(look) for look in looks]
        if any(value is not None for value, _ in measured):
            best = None if more_is_better is None else best_of(measured, more_is_better)
            rows.append({"label": label, "values": [value for value, _ in measured], "best": best, "unit": unit})

    row("held-out accuracy", "share", lambda look: _score(look, "eval/pass@1"), True)
    row("held-out score", "", lambda look: _score(look, "eval/score"), True)
    row("held-out loss", "nats", lambda look: _score(look, "eval/loss"), False)
    row("reward", "", lambda look: _recent(look, "reward/mean"), None)
    row("training loss", "nats", lambda look: _loss(look), None)
    row("steps", "", lambda look: (float(look.state.step), 0.0), None)
    row("time", "s", lambda look: (facts(look)["seconds"], 0.0), None)
    row("tokens", "", lambda look: (facts(look)["tokens"], 0.0), None)
    row("seconds a step", "s", lambda look: _recent(look, "time/total"), False)
    row("peak memory", "GiB", lambda look: (peak_gib(look), 0.02), False)
    row("findings", "", lambda look: (float(len(look.done.findings)), 0.0), None)
    rows.append({"label": "state", "values": [look.state.kind for look in looks], "best": None, "unit": ""})
    learned = [learning_of(look, {}).text for look in looks]
    rows.append({"label": "learning", "values": learned, "best": None, "unit": ""})
    return rows


def best_of(measured: Sequence[Measure], more_is_better: bool) -> int | None:
    """The index of the best value, if it differs from the second by more than twice the error of their difference."""
    known = [(value, error, at) for at, (value, error) in enumerate(measured) if value is not None]
    if len(known) < 2:
        return None
    known.sort(key=lambda item: item[0], reverse=more_is_better)
    (first, error, at), (second, other, _) = known[0], known[1]
    return at if abs(first - second) > 2 * math.hypot(error, other) and first != second else None


def _score(look: RunLook, metric: str) -> Measure:
    values = look.record.values(metric)
    if not values:
        return None, 0.0
    errors = look.record.values("eval/stderr")
    return values[-1], errors[-1] if errors and metric != "eval/loss" else 0.02 * abs(values[-1])


def _recent(look: RunLook, metric: str) -> Measure:
    """The median of the recent steps, with the error of their mean."""
    values = look.record.recent(metric)
    if not values:
        return None, 0.0
    return median(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _loss(look: RunLook) -> Measure:
    metric = "sft/loss" if look.record.values("sft/loss") else "rm/loss"
    return _recent(look, metric)


def _versions(looks: Sequence[RunLook]) -> list[dict[str, Any]]:
    """Versions and machines, where they differ."""
    found: dict[str, list[Any]] = {name: [look.run.get(name) for look in looks] for name in VERSIONS}
    packages = [look.run.get("packages") for look in looks]
    listed = [each if isinstance(each, dict) else {} for each in packages]
    for name in dict.fromkeys(name for each in listed for name in each):
        found[str(name)] = [each.get(name) for each in listed]
    found["device"] = [facts(look)["device"] for look in looks]
    found["devices"] = [facts(look)["devices"] for look in looks]
    found["machine"] = [look.run.get("host") for look in looks]
    found["commit"] = [look.run.get("git") for look in looks]
    return [{"key": key, "values": values} for key, values in found.items() if len(set(map(repr, values))) > 1]


def _seeds(runs: Sequence[tuple[str, RunLook]], settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of runs that differ in the seed alone."""
    groups: dict[str, list[str]] = defaultdict(list)
    for (id, _), each in zip(runs, settings):
        same = sorted((key, repr(value)) for key, value in each.items() if key not in (*IGNORED, SEED))
        groups[repr(same)].append(id)
    return [{"runs": ids, "text": f"{len(ids)} seeds"} for ids in groups.values() if len(ids) > 1]
