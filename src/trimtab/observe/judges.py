"""What judges counted, as metrics: `reward/NAME/...`, where NAME is the part's. Latencies in seconds, of single requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from trimtab.workers.messages import Tally

COUNTS = ("requests", "retries", "cache_hits", "scored", "failed")
"""Reported also where they are 0. Every completion is one of the last three."""


def gather(steps: Iterable[Mapping[str, Tally]]) -> dict[str, Tally]:
    """Adds up what judges did in several collections of rewards."""
    total: dict[str, Tally] = {}
    for judges in steps:
        for name, tally in judges.items():
            total.setdefault(name, Tally()).add(tally)
    return total


def judge_metrics(judges: Mapping[str, Tally], prefix: str = "reward") -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, tally in judges.items():
        found = {count: float(tally.counts[count]) for count in dict.fromkeys((*COUNTS, *sorted(tally.counts)))}
        if tally.latencies_s:
            half, most, longest = np.quantile(tally.latencies_s, [0.5, 0.95, 1.0])
            found |= {"latency_p50_s": float(half), "latency_p95_s": float(most), "latency_max_s": float(longest)}
        found["wait_s"] = tally.wait_s
        metrics |= {f"{prefix}/{name}/{key}": value for key, value in found.items()}
    return metrics
