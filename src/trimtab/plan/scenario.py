"""From a plan to a scenario for the simulator: engines that take the predicted times, and lengths drawn from quantiles."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from trimtab.base.errors import ConfigError, Problem
from trimtab.plan.arrange import Arrangement
from trimtab.plan.job import Job
from trimtab.plan.simulate import EngineSpeed, Scenario
from trimtab.plan.times import engine_clock

DEFAULT_STEPS = 4
"""Steps that are simulated, beside those that `learn.staleness` begins with."""
QUANTILES_EXAMPLE = "p50=300,p90=900,max=4096"
QUANTILES = 20
"""Quantiles of completion lengths that a distribution is kept as, evenly spaced."""


def parse_quantiles(text: str) -> tuple[float, ...]:
    """Lengths at evenly spaced quantiles, on straight lines between those that are given, such as p50=300,p90=900,max=4096."""
    points: list[tuple[float, float]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:p(\d+(?:\.\d+)?)|(min)|(max))\s*=\s*(\d+(?:\.\d+)?)\s*", part)
        share = None if match is None else 0.0 if match[2] else 1.0 if match[3] else float(match[1]) / 100
        if match is None or share is None or share > 1 or float(match[4]) < 1:
            what = f"{part.strip()!r} is neither a quantile nor part of a path to a run folder"
            raise ConfigError([Problem("--lengths", what, f"Write {QUANTILES_EXAMPLE}, or the folder of a run.")])
        points.append((share, float(match[4])))
    points.sort()
    if any(left[0] == right[0] or left[1] > right[1] for left, right in pairwise(points)):
        what = f"{text!r} names a quantile twice, or a higher one is shorter"
        raise ConfigError([Problem("--lengths", what, f"Write rising lengths, such as {QUANTILES_EXAMPLE}.")])
    if points[0][0] > 0:  # shorter than the first by as much as the next is longer, but not below a token
        (at, low), (after, high) = points[0], points[1] if len(points) > 1 else (points[0][0] + 1, points[0][1])
        points.insert(0, (0.0, max(1.0, low - (high - low) * at / (after - at))))
    if points[-1][0] < 1:
        points.append((1.0, points[-1][1]))
    return tuple(between(points, (i + 0.5) / QUANTILES) for i in range(QUANTILES))


def between(points: list[tuple[float, float]], at: float) -> float:
    """The value at `at` on the straight lines between the points."""
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return points[-1][1]


def draw_lengths(job: Job, steps: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """New tokens of every sequence of every step, from the job's quantiles; all as long as they may be where it has none."""
    if not job.lengths:
        return ((job.completion,) * job.sequences,) * steps
    drawn, known = random.Random(seed), sorted(job.lengths)

    def one() -> int:
        at = drawn.random() * len(known) - 0.5  # quantiles lie in the middle of their stretches
        low = max(0, min(len(known) - 2, int(at)))
        high = min(len(known) - 1, low + 1)
        return max(1, min(job.completion, round(known[low] + (at - low) * (known[high] - known[low]))))

    return tuple(tuple(one() for _ in range(job.sequences)) for _ in range(steps))


@dataclass(frozen=True)
class MeasuredTimes:
    """What a run has measured (run/measured_times.py), in place of predictions."""

    step_s: tuple[tuple[float, float], ...]
    """Seconds of a decode step by sequences in it, rising."""
    prefill_token_s: float
    reward_s: float
    train_s: float
    publish_s: float

    def engine(self, rows: int) -> EngineSpeed:
        points = list(self.step_s)

        def step_s(batch: float, context: float) -> float:
            if batch <= points[0][0] or len(points) == 1:
                return points[0][1]
            if batch >= points[-1][0]:
                return points[-1][1] * batch / points[-1][0]
            return between(points, batch)

        return EngineSpeed(rows, step_s, lambda tokens: tokens * self.prefill_token_s)


def scenario_of(
    arrangement: Arrangement, steps: int = DEFAULT_STEPS, seed: int = 0, measured: MeasuredTimes | None = None
) -> Scenario:
    """The scenario of a planned placement: so many steps, and before them those that the first policy samples ahead."""
    rollout, job, times = arrangement.rollout.plan, arrangement.job, arrangement.times
    clock = engine_clock(rollout.job, rollout.machine, rollout.run, rollout.place)
    rows = clock.rows
    engine = EngineSpeed(rows, clock.step_s, clock.prefill_s) if measured is None else measured.engine(rows)
    train_s = times.score + times.update if measured is None else measured.train_s
    return Scenario(
        engines=(engine,) * rollout.place.engines,
        lengths=draw_lengths(job, steps + arrangement.staleness, seed),
        samples=job.samples,
        prompt_tokens=job.typical_prompt,
        staleness=arrangement.staleness,
        reward_s=0.0 if measured is None else measured.reward_s,
        train_s=train_s,
        publish_s=times.publish if measured is None else measured.publish_s,
        colocated="actor" in arrangement.rollout.roles,
    )


def mean_length(scenario: Scenario) -> float:
    return fmean(length for step in scenario.lengths for length in step)


def with_lengths(job: Job, lengths: tuple[float, ...]) -> Job:
    """The job with completions of these lengths, none longer than it may be."""
    return replace(job, lengths=tuple(min(float(job.completion), length) for length in lengths))
