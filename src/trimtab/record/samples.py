"""What the policy writes: a few completions of a step in RUN/samples/step-N.jsonl, of the best, the worst and random groups.

A file is replaced whole, so a resumed run that repeats a step leaves one file for it. samples/index.jsonl has a line for each
file, of training and of evaluation; of a step that is repeated, the last line counts.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.base.errors import cut
from trimtab.base.files import write_file
from trimtab.record.jsonl import dump_line, finite
from trimtab.record.layout import eval_samples_file, samples_file

if TYPE_CHECKING:  # trajectory.py needs torch; reading samples must not
    from trimtab.data.prompt import Prompt
    from trimtab.rollout.trajectory import Group, Trajectory

MAX_ROWS = 32
FAILED_SHARE = 4
"""At most one in so many rows is there only because it failed."""
ANSWER_COLUMNS = ("answer", "answers", "solution", "target", "ground_truth", "label")
"""Columns that may hold what was expected; the first that a row has is shown."""
Kind = Literal["train", "eval"]
Chosen = Literal["best", "worst", "random", "failed"]


@dataclass(frozen=True)
class ChosenSample:
    """A completion that is kept, and why."""

    trajectory: Trajectory
    group: Group
    chosen: Chosen


def sample_rows(
    step: int,
    groups: Sequence[Group],
    max_rows: int = MAX_ROWS,
    seed: int = 0,
    task_of: Callable[[Prompt], str] | None = None,
) -> list[dict[str, Any]]:
    """Rows of at most `max_rows` completions. Which groups are the random ones follows from seed and step."""
    found = choose_samples(groups, max_rows, random.Random(f"{seed}:{step}"))
    return [{"step": step} | _row(each, task_of) for each in found]


def write_samples(run_dir: Path, kind: Kind, step: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write a file of samples; returns its line of the index."""
    path = samples_file(run_dir, step) if kind == "train" else eval_samples_file(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [dump_line(row) for row in rows]
    write_file(path, lines)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "step": step,
        "kind": kind,
        "file": path.relative_to(run_dir).as_posix(),
        "rows": len(rows),
        "bytes": sum(map(len, lines)),
        "reward_min": min(rewards, default=None),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "reward_max": max(rewards, default=None),
        "cut_off": sum(row["finish"] == "length" for row in rows),
        "failed": sum(row["failure"] is not None for row in rows),
    }


def choose_samples(groups: Sequence[Group], max_rows: int, draw: random.Random) -> list[ChosenSample]:
    """The best group by mean reward, the worst, a random one, the second best, and so on while they fit whole; then completions
    that failed, for which some rows are kept free.

    A group larger than its share of the rows shows its best and worst samples, so that all kinds have room.
    """
    failed = [(t, group) for group in groups for t in group.trajectories if t.failure is not None]
    room = max_rows - min(len(failed), max_rows // FAILED_SHARE)
    share = max(1, room // min(3, max(1, len(groups))))
    chosen: list[ChosenSample] = []
    for group, why in _in_turn(sorted(groups, key=_mean_reward, reverse=True), draw):
        rows = _extremes(group.trajectories, share)
        if len(chosen) + len(rows) > room:
            break
        chosen += [ChosenSample(trajectory, group, why) for trajectory in rows]
    there = {id(each.trajectory) for each in chosen}
    left = [ChosenSample(t, group, "failed") for t, group in failed if id(t) not in there]
    return chosen + left[: max_rows - len(chosen)]


def _in_turn(ranked: list[Group], draw: random.Random) -> Iterator[tuple[Group, Chosen]]:
    """Best, worst, a random one of those between, second best, ..."""
    left = list(ranked)
    while left:
        yield left.pop(0), "best"
        if left:
            yield left.pop(), "worst"
        if left:
            yield left.pop(draw.randrange(len(left))), "random"


def _extremes(trajectories: list[Trajectory], rows: int) -> list[Trajectory]:
    """All, in sample order, or the best and the worst where there are more than `rows`."""
    if len(trajectories) <= rows:
        return trajectories
    ranked = sorted(trajectories, key=_reward, reverse=True)
    worst = rows // 2
    return ranked[: rows - worst] + ranked[len(ranked) - worst :]


def _reward(trajectory: Trajectory) -> float:
    """Samples without a reward rank last: a failure is worth reading."""
    reward = finite(trajectory.reward)
    return -math.inf if reward is None else reward


def _mean_reward(group: Group) -> float:
    rewards = _rewards(group)
    return sum(rewards) / len(rewards) if rewards else -math.inf


def _rewards(group: Group) -> list[float]:
    return [reward for reward in map(_reward, group.trajectories) if reward > -math.inf]


def _row(each: ChosenSample, task_of: Callable[[Prompt], str] | None) -> dict[str, Any]:
    sample, rewards = each.trajectory, _rewards(each.group)
    held, columns = sample.conversation, sample.prompt.columns
    turns = {} if held is None else {"turns": held.turns, "earned": finite(held.earned)}
    answer = next((columns[name] for name in ANSWER_COLUMNS if columns.get(name) is not None), None)
    return {
        "prompt_id": sample.prompt.id,
        "sample": sample.sample,
        "prompt": sample.prompt.prompt,
        "completion": sample.text,
        **turns,
        "rewards": {name: finite(value) for name, value in sample.rewards.items()},
        "reward": finite(sample.reward),
        "finish": sample.finish,
        "tokens": len(sample),
        "failure": sample.failure,
        "group_mean": statistics.fmean(rewards) if rewards else None,
        "group_std": statistics.pstdev(rewards) if rewards else None,
        "advantage": finite(sample.advantage),
        "answer": None if answer is None else cut(str(answer)),
        "task": None if task_of is None else task_of(sample.prompt),
        "prompt_tokens": len(sample.prompt.tokens),
        "chosen": each.chosen,
    }
