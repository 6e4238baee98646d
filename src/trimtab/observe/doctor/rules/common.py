"""What several rules ask of a run: does its reward rise, how often does it succeed, is there anything left to learn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median

from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.shift import MIN_VALUES_AT_NEW_LEVEL, Shift, clear_fall

LEARNED_SUCCESS_RATE = 0.85
"""Success rate from which a plateau, few signals and a low entropy are what learning looks like when it is over."""
REWARD = ("reward/mean",)
ENTROPY = "policy/entropy"
MIN_ENTROPY_NATS = 0.1
"""Nats per token. A few tokens make up a lower one, and it scatters by large factors."""
LARGE_CHANGE_IN_STD = 0.5
"""Change of the mean reward that is large, in standard deviations of a step's samples."""


@dataclass(frozen=True)
class Levels:
    """The mean reward until a step and from it on."""

    step: int
    before: float
    after: float
    large: float
    """A change of this size is large."""

    @property
    def fell(self) -> bool:
        """Also to a quarter: a reward of 0.1 whose samples differ by 0.3 cannot fall by half of that."""
        fall = self.before - self.after
        return fall > 0 and (fall >= self.large or self.after <= 0.25 * self.before)

    @property
    def rose(self) -> bool:
        return self.after - self.before >= self.large

    def words(self) -> str:
        return f"the reward was {self.before:.3g} before step {self.step} and is {self.after:.3g} since (means)"


def spread(record: Record) -> float:
    """Typical distance between the rewards of two samples, where they differ: the scale on which a reward's change is large or
    small."""
    return median([std for std in record.values("reward/std") if std > 0] or [0.0])


def reward_levels(record: Record, step: int) -> Levels | None:
    """The mean reward before a step and from it on; None where there is nothing on one side."""
    points = record.points("reward/mean")
    before, after = [value for at, value in points if at < step], [value for at, value in points if at >= step]
    return Levels(step, fmean(before), fmean(after), LARGE_CHANGE_IN_STD * spread(record)) if before and after else None


def sudden_fall(record: Record) -> Levels | None:
    """The reward's fall at one step, for good. It is clear by itself, or it comes with a change of the entropy, which scatters
    little: one step of a few prompts has a reward that may be luck, but no lucky entropy."""
    for name in (ENTROPY, "reward/mean"):
        shift = entropy_shift(record) if name == ENTROPY else clear_fall(record.values(name), _noise(record))
        found = reward_levels(record, record.shift_step(name, shift)) if shift else None
        if found is not None and found.fell:
            return found
    return None


def entropy_shift(record: Record) -> Shift | None:
    """Where the entropy changes at once and for good, from or to one that is worth the name."""
    shift = record.shift(ENTROPY)
    return shift if shift and max(shift.before, shift.after) >= MIN_ENTROPY_NATS else None


def _noise(record: Record) -> float:
    """Standard error of a step's mean reward: samples of one prompt count as one."""
    samples, size = record.now("run/samples") or 1.0, record.setting("learn.samples_per_prompt", 1)
    return spread(record) / math.sqrt(max(1.0, samples / size))


def reward_rises(record: Record) -> bool:
    return record.trend("reward/mean").rises(0.1 * spread(record)) and sudden_fall(record) is None


def reward_falls(record: Record) -> bool:
    return record.trend("reward/mean").falls(0.1 * spread(record)) or sudden_fall(record) is not None


def nothing_gained(record: Record, step: int) -> bool:
    """The reward has not become clearly better since a step, nor does it become so."""
    levels = reward_levels(record, step)
    return not (learned(record) or reward_rises(record) or (levels is not None and levels.rose))


def solved_before(record: Record) -> float | None:
    """pass@1 before training, where it was clearly more than nothing."""
    score, error = record.at("eval/pass@1", 0), record.at("eval/stderr", 0) or 0.0
    return score if score is not None and score > 2 * error else None


def never_differed(record: Record) -> bool:
    """Every sample of every step has had the same reward."""
    stds = record.values("reward/std")
    return len(stds) > MIN_VALUES_AT_NEW_LEVEL and not any(stds)


def reward_words(record: Record) -> str:
    """For evidence: what the reward did meanwhile."""
    way = "rises" if reward_rises(record) else "falls" if reward_falls(record) else "does not rise"
    return f"the reward {way} ({record.early('reward/mean') or 0.0:.3g} to {record.now('reward/mean') or 0.0:.3g})"


def rewards_are_rates(record: Record) -> bool:
    """Rewards are 0 or 1: their std follows from their mean."""
    pairs = list(zip(record.recent("reward/mean"), record.recent("reward/std")))
    return bool(pairs) and median(abs(std**2 - mean * (1 - mean)) for mean, std in pairs) < 1e-3


def success_rate(record: Record) -> float | None:
    """Share of samples that succeed, where rewards are 0 or 1; else the latest pass@1."""
    if rewards_are_rates(record):
        return median(record.recent("reward/mean"))
    scores = record.values("eval/pass@1")
    return scores[-1] if scores else None


def learned(record: Record) -> bool:
    rate = success_rate(record)
    return rate is not None and rate >= LEARNED_SUCCESS_RATE


def learned_since(record: Record) -> int | None:
    """The step from which on the success rate is that of a learned task; None where it is not learned."""
    if not learned(record):
        return None
    name, width = ("reward/mean", 10) if rewards_are_rates(record) else ("eval/pass@1", 1)
    points = record.points(name)
    width = max(1, min(width, len(points) // 10))
    medians = ((step, median(value for _, value in points[at : at + width])) for at, (step, _) in enumerate(points))
    return next((step for step, level in medians if level >= LEARNED_SUCCESS_RATE), None)


def on_policy(record: Record) -> str | None:
    """Why rules about the policy ratio have nothing to judge."""
    return "one update per batch: the ratio is 1 by construction" if record.updates_per_batch == 1 else None


def on_cpu(record: Record) -> str | None:
    """Why rules about a GPU's speed have nothing to judge."""
    return None if record.on_cuda else "runs on a CPU"


def update_memory_share(record: Record) -> float | None:
    """The update's peak divided by the device's memory; None where one of them is not known."""
    size, peak = record.now("memory/device_total_gib"), record.now("memory/update_peak_gib")
    return peak / size if size and peak else None


def microbatches_per_update(record: Record) -> float:
    return (record.now("run/microbatches") or 0.0) / record.updates_per_batch


def total(record: Record, name: str) -> float:
    """Sum over the recent steps."""
    return sum(record.recent(name))
