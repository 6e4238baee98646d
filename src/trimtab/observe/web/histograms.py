"""Distributions and evaluations of a run as a page draws them: at most so many columns, and the outcome of every prompt."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trimtab.observe.look import RunLook
from trimtab.record.jsonl import finite

MOST_COLUMNS = 400
"""Stretches of steps; a heat map has no more columns."""
MOST_RESULTS = 150_000
"""Outcomes of prompts, over all evaluations."""
NAMES = ("lengths", "rewards", "advantages")


def distributions(look: RunLook) -> dict[str, Any] | None:
    rows = look.reader.distributions()
    if not rows:
        return None
    width = -(-len(rows) // MOST_COLUMNS)
    stretches = [rows[at : at + width] for at in range(0, len(rows), width)]
    found: dict[str, Any] = {"steps": [stretch[-1]["step"] for stretch in stretches], "stretch": width}
    for name in NAMES:
        found[name] = _histograms(stretches, name)
    found["groups"] = [_groups(stretch) for stretch in stretches]
    if not any(found["groups"]):
        found["groups"] = None
    return found


def _histograms(stretches: list[list[dict[str, Any]]], name: str) -> dict[str, Any] | None:
    """Counts of each stretch in the bins of the widest range; counts of other bins go where their middles are."""
    edges, raw = _widest(stretches, name)
    if edges is None:
        return None
    counts = []
    for stretch in stretches:
        values = [value for row in stretch if isinstance(value := row.get(name), dict)]
        alike = [
            value["counts"] for value in values if value.get("edges") == raw and _is_row(value.get("counts"), edges)
        ]
        total = np.array(alike, dtype=float).sum(axis=0) if alike else np.zeros(len(edges) - 1)
        for value in values:
            pair = _pair(value) if value.get("edges") != raw else None
            if pair is not None:
                middles = (pair[0][1:] + pair[0][:-1]) / 2
                total = total + np.histogram(middles.clip(edges[0], edges[-1]), bins=edges, weights=pair[1])[0]
        counts.append([round(count) for count in total.tolist()])
    return {"edges": [float(edge) for edge in edges], "counts": counts}


def _widest(stretches: list[list[dict[str, Any]]], name: str) -> tuple[np.ndarray | None, Any]:
    """The edges with the widest range, and as they were written."""
    best, raw, last = None, None, None
    for stretch in stretches:
        for row in stretch:
            value = row.get(name)
            if not isinstance(value, dict) or value.get("edges") == last:
                continue
            pair, last = _pair(value), value.get("edges")
            if pair is not None and (best is None or pair[0][-1] - pair[0][0] > best[-1] - best[0]):
                best, raw = pair[0], last
    return best, raw


def _is_row(counts: Any, edges: np.ndarray) -> bool:
    return (
        isinstance(counts, list)
        and len(counts) == len(edges) - 1
        and all(type(count) in (int, float) and math.isfinite(count) for count in counts)
    )


def _pair(value: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Edges that rise, and a count between each two; None where it is something else."""
    if not isinstance(value, dict):
        return None
    try:
        edges, counts = np.array(value["edges"], dtype=float), np.array(value["counts"], dtype=float)
    except (KeyError, TypeError, ValueError):
        return None
    whole = edges.ndim == counts.ndim == 1 and len(edges) == len(counts) + 1 and len(counts) > 0
    if not whole or not np.isfinite(edges).all() or not np.isfinite(counts).all() or (np.diff(edges) <= 0).any():
        return None
    return edges, counts


def _groups(stretch: list[dict[str, Any]]) -> list[int]:
    """Groups with 0, 1, ... right samples."""
    total: list[int] = []
    for row in stretch:
        groups = row.get("groups")
        right = groups.get("right") if isinstance(groups, dict) else None
        for at, count in enumerate(right if isinstance(right, list) else []):
            if at == len(total):
                total.append(0)
            total[at] += int(finite(count) or 0)
    return total


def evaluations(look: RunLook) -> dict[str, Any]:
    """Outcome of every prompt, of as many evaluations as fit: the first, the last, the best, then evenly."""
    scored = sorted(
        {step for name in ("eval/pass@1", "eval/score", "eval/loss") for step, _ in look.record.points(name)}
    )
    results: dict[str, dict[str, list[Any]]] = {}
    scores = dict(look.record.points("eval/pass@1") or look.record.points("eval/score"))
    best = [max(scores, key=lambda step: scores[step])] if scores else []
    kept = 0
    for step in dict.fromkeys([*scored[:1], *scored[-1:], *best, *scored]):
        rows = look.reader.eval_results(step)
        if not rows or kept + len(rows) > MOST_RESULTS:
            continue
        kept += len(rows)
        results[str(step)] = {
            str(row.get("prompt_id")): [_right(row.get("right")), finite(row.get("reward")), finite(row.get("tokens"))]
            for row in rows
        }
    return {"steps": scored, "results": results or None}


def _right(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
