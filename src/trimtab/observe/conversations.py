"""The numbers of a step's conversations with an environment: `environment/...`. None where there is no environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trimtab.rollout.trajectory import Group


def conversation_metrics(groups: Sequence[Group], wait_s: float, prefix: str = "environment") -> dict[str, float]:
    """Means are over all completions. `wait_s`: for which sampling stood still for environments."""
    everyone = [t for group in groups for t in group.trajectories]
    played = [t.conversation for t in everyone if t.conversation is not None]
    if not played:
        return {}
    counts: Counter[str] = Counter()
    for one in played:
        counts.update(one.counts)
    metrics = {
        f"{prefix}/turns_mean": sum(len(one.answers) for one in played) / len(played),
        f"{prefix}/turn_limit": sum(t.finish == "turns" for t in everyone) / len(everyone),
        f"{prefix}/tokens_mean": sum(len(t.tokens) - len(t) for t in everyone) / len(everyone),
        f"{prefix}/failed": float(sum(t.failed_in == "environment" and t.failure is not None for t in everyone)),
        f"{prefix}/seconds": sum(one.seconds for one in played),
        f"{prefix}/wait_s": wait_s,
        **{f"{prefix}/{name}": total / len(played) for name, total in counts.items()},
    }
    if counts["tool_calls"]:
        metrics[f"{prefix}/tool_error_share"] = counts["tool_errors"] / counts["tool_calls"]
        metrics[f"{prefix}/tool_malformed_share"] = counts["tool_malformed"] / counts["tool_calls"]
    return metrics
