"""What several rules ask of a run: does its reward rise, how often does it succeed, is there anything left to learn."""

from __future__ import annotations

from statistics import median

from trimtab.observe.doctor.record import Record

LEARNED = 0.85
"""Success rate from which a plateau, few signals and a low entropy are what learning looks like when it is over."""
REWARD = ("reward/mean",)


def spread(record: Record) -> float:
    """Typical distance between the rewards of two samples: the scale on which a reward's change is large or small."""
    return median(record.values("reward/std") or [0.0])


def reward_rises(record: Record) -> bool:
    return record.trend("reward/mean").rises(0.1 * spread(record))


def reward_falls(record: Record) -> bool:
    return record.trend("reward/mean").falls(0.1 * spread(record))


def reward_words(record: Record) -> str:
    """For evidence: what the reward did meanwhile."""
    way = "rises" if reward_rises(record) else "falls" if reward_falls(record) else "does not rise"
    return f"the reward {way} ({record.early('reward/mean') or 0.0:.3g} to {record.now('reward/mean') or 0.0:.3g})"


def success_rate(record: Record) -> float | None:
    """Share of samples that succeed, where rewards are 0 or 1 (their std follows from their mean); else the latest pass@1."""
    pairs = list(zip(record.recent("reward/mean"), record.recent("reward/std")))
    if pairs and median(abs(std**2 - mean * (1 - mean)) for mean, std in pairs) < 1e-3:
        return median(mean for mean, _ in pairs)
    scores = record.values("eval/pass@1")
    return scores[-1] if scores else None


def learned(record: Record) -> bool:
    rate = success_rate(record)
    return rate is not None and rate >= LEARNED


def on_policy(record: Record) -> str | None:
    """Why rules about the policy ratio have nothing to judge."""
    return "one update a batch: the ratio is 1 by construction" if record.updates_per_batch == 1 else None


def total(record: Record, name: str) -> float:
    """Sum over the recent steps."""
    return sum(record.recent(name))
