"""Held-out accuracy: pass@1 and pass@k with evaluation's own sampling settings.

pass@k is the unbiased estimate from n samples of which c succeed, 1 - C(n-c, k) / C(n, k), averaged over prompts (Chen et al.
2021). A completion whose reward failed is left out of its prompt's n and counted in `eval/failed`; it is not a miss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trimtab.config.schema import Eval
from trimtab.rollout.trajectory import Group

EVAL_STEP = 2**40
"""Stands in for the step in sampling keys, so that every evaluation draws the same random numbers."""


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Chance that at least one of k samples succeeds, estimated from n >= k samples."""
    assert 1 <= k <= n
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def ks(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})


def scores(groups: Sequence[Group], settings: Eval, part: str) -> dict[str, float]:
    """Metrics of one evaluation. Empty where no completion could be scored."""
    tallies = []
    failed = 0
    for group in groups:
        values = [t.rewards[part] for t in group.trajectories if part in t.rewards]
        failed += len(group.trajectories) - len(values)
        if values:
            tallies.append((len(values), sum(v >= settings.threshold for v in values)))
    if not tallies:
        return {"eval/failed": float(failed)}
    result = {}
    for k in ks(settings.samples_per_prompt):
        eligible = [pass_at_k(n, c, k) for n, c in tallies if n >= k]
        if eligible:
            result[f"eval/pass@{k}"] = sum(eligible) / len(eligible)
    lengths = [len(t) for group in groups for t in group.trajectories]
    return {
        **result,
        "eval/stderr": _standard_error([c / n for n, c in tallies]),
        "eval/prompts": float(len(tallies)),
        "eval/failed": float(failed),
        "eval/length_mean": sum(lengths) / len(lengths),
        "eval/truncated": sum(t.finish == "length" for g in groups for t in g.trajectories) / len(lengths),
    }


def _standard_error(values: list[float]) -> float:
    """Of the mean over prompts."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values)) / max(1, len(values))
