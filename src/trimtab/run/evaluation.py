"""Held-out accuracy: pass@1 and pass@k, with evaluation's own temperature and the stops of training.

pass@k is the unbiased estimate from n samples of which c succeed, 1 - C(n-c, k) / C(n, k), averaged over prompts (Chen et al.
2021). A completion without a score, because its reward failed or did not apply, is left out of its prompt's n and counted in
`eval/failed` or `eval/not_applicable`; it is not a miss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trimtab.config.resolved import eval_max_new_tokens, eval_sampling
from trimtab.config.schema import Config, Eval
from trimtab.data.prompt import Prompt
from trimtab.observe.conversations import conversation_metrics
from trimtab.observe.judges import judge_metrics
from trimtab.observe.tasks import Tasks
from trimtab.record.jsonl import finite
from trimtab.reward.scorer import check_failures
from trimtab.rollout.engine import Request
from trimtab.rollout.trajectory import Group
from trimtab.run.roles import Generator, Rewarder
from trimtab.run.rollout_step import counted

EVAL_STEP = 2**40
"""Stands in for the step in sampling keys, so that every evaluation draws the same random numbers."""

METRICS_PER_TASK = ("pass@1", "score", "prompts", "length_mean", "truncated")
"""Scores that are also reported for each task."""


def measure(
    config: Config, prompts: Sequence[Prompt], generator: Generator, rewarder: Rewarder, tasks: Tasks | None = None
) -> tuple[dict[str, float], list[Group]]:
    """Scores of the policy that the engine holds, and the completions they come from."""
    settings = config.eval.with_values({"threshold": success_threshold(config, rewarder.names)})
    sampling, limit = eval_sampling(config), eval_max_new_tokens(config)
    requests = [
        Request(prompt, settings.samples_per_prompt, limit, sampling, config.learn.seed, EVAL_STEP)
        for prompt in prompts
    ]
    submitted = []
    for group in counted(generator, requests):
        rewarder.submit(group)
        submitted.append(group)
    groups = sorted(rewarder.collect(submitted), key=lambda group: group.index)
    check_failures(groups, config.observe.max_failed_rewards)
    part = settings.part or rewarder.names[0]
    found = scores(groups, settings, part) | judge_metrics(rewarder.stats.judges, "eval")
    found |= conversation_metrics(groups, generator.stats.wait_s, "eval/environment")
    for name, mine in tasks.split(groups).items() if tasks else ():
        alone = scores(mine, settings, part)
        found |= {f"eval/task/{name}/{key}": alone[f"eval/{key}"] for key in METRICS_PER_TASK if f"eval/{key}" in alone}
    return found, groups


def success_threshold(config: Config, names: Sequence[str]) -> float | None:
    """From which score on a completion succeeds; None where no score says so: a reward model's have mean 0 and no maximum.
    `names`: those of the reward's parts."""
    settings = config.eval
    decides = config.reward[list(names).index(settings.part)] if settings.part else config.reward[0]
    if settings.threshold is not None:
        return settings.threshold
    return None if decides.fn.startswith("model:") else 1.0


def outcomes(config: Config, names: Sequence[str], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """What each prompt came to. `right`: at least half of its completions are; null where none has a score or none says so."""
    threshold, part = success_threshold(config, names), config.eval.part or names[0]
    found = []
    for group in groups:
        values = [t.rewards[part] for t in group.trajectories if part in t.rewards]
        rights = None if threshold is None or not values else sum(value >= threshold for value in values)
        found.append(
            {
                "prompt_id": group.prompt.id,
                "right": None if rights is None else 2 * rights >= len(values),
                "reward": finite(sum(values) / len(values)) if values else None,
                "tokens": sum(map(len, group.trajectories)) / len(group.trajectories),
                "samples": len(group.trajectories),
                "rights": rights,
            }
        )
    return found


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Chance that at least one of k samples succeeds, estimated from n >= k samples."""
    assert 1 <= k <= n
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def ks(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sorted({*powers, samples})


def scores(groups: Sequence[Group], settings: Eval, part: str) -> dict[str, float]:
    """Metrics of one evaluation. Without a pass@k where no completion could be scored; without a threshold, the mean score."""
    found = [[t.rewards[part] for t in group.trajectories if part in t.rewards] for group in groups]
    scored = [values for values in found if values]
    result = _mean_score(scored) if settings.threshold is None else _solved(scored, settings, settings.threshold)
    completions = [t for group in groups for t in group.trajectories]
    unscored = [t for t in completions if part not in t.rewards]
    failed = sum(t.failure is not None for t in unscored)
    if len(unscored) > failed:
        result["eval/not_applicable"] = float(len(unscored) - failed)
    return {
        **result,
        "eval/prompts": float(len(scored)),
        "eval/failed": float(failed),
        "eval/length_mean": sum(map(len, completions)) / len(completions),
        "eval/truncated": sum(t.finish == "length" for t in completions) / len(completions),
    }


def _solved(scored: Sequence[Sequence[float]], settings: Eval, threshold: float) -> dict[str, float]:
    tallies = [(len(values), sum(value >= threshold for value in values)) for values in scored]
    result = {}
    for k in ks(settings.samples_per_prompt):
        eligible = [pass_at_k(n, c, k) for n, c in tallies if n >= k]
        if eligible:
            result[f"eval/pass@{k}"] = sum(eligible) / len(eligible)
    if tallies:
        result["eval/stderr"] = _standard_error([c / n for n, c in tallies])
    return result


def _mean_score(scored: Sequence[Sequence[float]]) -> dict[str, float]:
    means = [sum(values) / len(values) for values in scored]
    return {"eval/score": sum(means) / len(means), "eval/stderr": _standard_error(means)} if means else {}


def _standard_error(values: list[float]) -> float:
    """Standard error of the mean over prompts."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values)) / max(1, len(values))
