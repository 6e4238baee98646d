"""What the policy writes: a few completions of a step in RUN/samples/step-N.jsonl, best and worst groups first.

The file is replaced whole, so a resumed run that repeats a step leaves one file for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.base.files import write_file
from trimtab.record.jsonl import dump_line, finite
from trimtab.record.layout import samples_file

if TYPE_CHECKING:  # trajectory.py needs torch; reading samples must not
    from trimtab.rollout.trajectory import Group, Trajectory

MAX_ROWS = 32


def write_samples(run_dir: Path, step: int, groups: Sequence[Group]) -> Path:
    """Write at most `MAX_ROWS` completions and return the file."""
    path = samples_file(Path(run_dir), step)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (dump_line({"step": step} | _row(sample)) for sample in choose_samples(groups)))
    return path


def choose_samples(groups: Sequence[Group], max_rows: int = MAX_ROWS) -> list[Trajectory]:
    """The best group by mean reward, the worst, the second best, and so on while they fit whole.

    A group larger than half the rows shows its best and worst samples, so that both ends of the batch have room.
    """
    share = max_rows if len(groups) < 2 else max_rows // 2
    chosen: list[Trajectory] = []
    for group in _from_both_ends(sorted(groups, key=_mean_reward, reverse=True)):
        rows = _extremes(group.trajectories, share)
        if len(chosen) + len(rows) > max_rows:
            break
        chosen += rows
    return chosen


def _from_both_ends(ranked: list[Any]) -> list[Any]:
    """First, last, second, last but one, ..."""
    half = (len(ranked) + 1) // 2
    front, back = ranked[:half], ranked[half:][::-1]
    return [item for pair in zip(front, [*back, None]) for item in pair if item is not None]


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
    rewards = [reward for reward in map(_reward, group.trajectories) if reward > -math.inf]
    return sum(rewards) / len(rewards) if rewards else -math.inf


def _row(sample: Trajectory) -> dict[str, Any]:
    held = sample.conversation
    turns = {} if held is None else {"turns": held.turns, "earned": finite(held.earned)}
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
    }
