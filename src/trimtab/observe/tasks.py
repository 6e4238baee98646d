"""The numbers of a step for each task (`data.task`): `reward/task/NAME/...`, `response/task/NAME/...`, `policy/task/NAME/kl_ref`.

Sums over tasks are those of the step: every sample belongs to one task. A task without a sample in a step has no row in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.data.prompt import Prompt
from trimtab.observe.task_names import OTHER, metric_names
from trimtab.rollout.trajectory import Group
from trimtab.update.batch import Sample
from trimtab.update.samples import usable
from trimtab.update.updater import UpdateStats


@dataclass(frozen=True)
class Tasks:
    """Which column names a row's task, and what tasks are called in metrics."""

    column: str
    names: Mapping[str, str]

    @classmethod
    def found(cls, column: str, rows: Iterable[Mapping[str, Any]], first: Sequence[str] = ()) -> Tasks:
        """Those of the rows, the most frequent first; ahead of them those of `first`, whatever their number."""
        counts = Counter(str(row[column]) for row in rows)
        ordered = sorted(counts, key=lambda task: (-counts[task], task))
        return cls(column, metric_names(list(dict.fromkeys((*first, *ordered)))))

    def of(self, prompt: Prompt) -> str:
        """The name in metrics of a prompt's task."""
        return self.names.get(str(prompt.columns[self.column]), OTHER)

    def split(self, groups: Sequence[Group]) -> dict[str, list[Group]]:
        found: dict[str, list[Group]] = defaultdict(list)
        for group in groups:
            found[self.of(group.prompt)].append(group)
        return found


def task_metrics(tasks: Tasks, groups: Sequence[Group], zero_signal: Sequence[Group] | None) -> dict[str, float]:
    """Rewards and lengths of everything sampled; `zero_signal` as for `reward_metrics`."""
    metrics: dict[str, float] = {}
    silent = Counter(tasks.of(group.prompt) for group in zero_signal or ())
    for name, mine in tasks.split(groups).items():
        trajectories = [t for group in mine for t in group.trajectories]
        rewards = [t.reward for t in trajectories if t.reward is not None]
        metrics |= {
            f"reward/task/{name}/mean": float(np.mean(rewards)) if rewards else float("nan"),
            f"reward/task/{name}/samples": float(len(trajectories)),
            f"reward/task/{name}/failed": float(usable(mine)[1]["reward_failed"]),
            f"response/task/{name}/length_mean": float(np.mean([len(t) for t in trajectories])),
            f"response/task/{name}/truncated": sum(t.finish == "length" for t in trajectories) / len(trajectories),
        }
        if zero_signal is not None:
            metrics[f"reward/task/{name}/zero_std_groups"] = silent[name] / len(mine)
    return metrics


def task_kl(
    tasks: Tasks,
    groups: Sequence[Group],
    samples: Sequence[Sequence[Sample]],
    epoch: Sequence[tuple[Sequence[Sample], UpdateStats]],
) -> dict[str, float]:
    """KL to the reference, in nats per token, from the updates of one pass over the batch, each with its samples. With one update
    a step the mean over all tokens is `policy/kl_ref`."""
    sums: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    task_of = {id(sample): tasks.of(group.prompt) for group, mine in zip(groups, samples) for sample in mine}
    for used, stats in epoch:
        for places, totals in stats.kl_ref_of:
            for place, total in zip(places, totals.tolist()):
                task = task_of[id(used[place])]
                sums[task] += total
                tokens[task] += used[place].learned
    return {f"policy/task/{name}/kl_ref": sums[name] / count for name, count in tokens.items()}
