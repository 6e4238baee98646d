"""PPO's critic: does it know more about what will be earned than a constant would, and does it learn."""

from __future__ import annotations

from trimtab.observe.doctor.record import RECENT_STEPS, Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom, steady_band
from trimtab.observe.doctor.rules.common import reward_words
from trimtab.observe.format import number

EXPLAINED, LOSS = "value/explained_variance", "value/loss"
WORSE_THAN_CONSTANT = -0.05
"""Explained variance scatters around 0 where there is little to know; this far below it is worse than a constant."""


def _warm_up(record: Record) -> int:
    """Steps that its own warm-up takes, and that its head needs to find the mean of returns."""
    return record.setting("learn.critic.warmup_steps", 0) + 10


def critic_worse(record: Record) -> Symptom | None:
    seen = record.values(EXPLAINED)[_warm_up(record) :][-RECENT_STEPS:]
    if len(seen) < 10:
        return None
    below, middle = sum(value < 0 for value in seen), sorted(seen)[len(seen) // 2]
    if middle >= WORSE_THAN_CONSTANT or below < 0.8 * len(seen):
        return None
    words = f"median {number(middle)}, below 0 in {below} of the last {len(seen)} steps; {reward_words(record)}"
    return Symptom("bad" if middle < -0.5 else "warn", words)


def critic_diverges(record: Record) -> Symptom | None:
    """Returns may spread as the policy changes, and the loss with them; so it counts only where less of them is explained."""
    skip = _warm_up(record)
    loss, known = record.trend(LOSS, skip), record.trend(EXPLAINED, skip)
    if not loss.rises(max(loss.start, 1e-9)) or known.rises(0.02):
        return None
    seen = (
        f"{number(loss.start)} to {number(loss.end)} (fitted) after step {skip}; explained variance {number(known.start)} to "
        f"{number(known.end)}"
    )
    clipped = record.now("value/clip_fraction") or 0.0
    if clipped > 0.3:
        seen += f"; learn.critic.clip clips {clipped:.0%} of the values"
        return Symptom("warn", seen, "learn.critic.clip is too small", "raise learn.critic.clip, or set it to null")
    return Symptom("warn", seen)


def _no_critic(record: Record) -> str | None:
    return None if record.values(EXPLAINED) else "there is no critic"


RULES = (
    DoctorRule(
        "critic_worse",
        "the critic predicts worse than a constant",
        unit="explained variance of returns: 1 is perfect, 0 is as good as predicting their mean",
        healthy="above 0 and rising after its warm-up; 0.1 to 0.6 where one reward comes at the end",
        found_when="median of the last 20 steps below -0.05 and four in five of them below 0, from ten steps after "
        "learn.critic.warmup_steps on; bad below -0.5",
        cause="the critic's learning rate is too high, the policy changes faster than the critic, or rewards are unbounded",
        remedy="lower learn.critic.lr; raise learn.critic.warmup_steps; bound the reward with learn.reward_clip; lower learn.lr",
        kind="advice",
        check=critic_worse,
        band=steady_band(EXPLAINED, "above 0 after its warm-up", low=0.0),
        needs=(EXPLAINED,),
        steps=20,
        unless=_no_critic,
    ),
    DoctorRule(
        "critic_diverges",
        "the critic's loss rises",
        unit="mean of (value - return)² / 2 a token",
        healthy="falls, or stays level while the spread of returns stays level",
        found_when="the trend doubles it after the warm-up, while explained variance does not rise",
        cause="the critic's steps are too large, or returns grow: an unbounded reward, or a growing KL penalty in the reward",
        remedy="lower learn.critic.lr; set learn.reward_clip; look at value/return_mean and policy/kl_ref",
        kind="advice",
        check=critic_diverges,
        needs=(LOSS, EXPLAINED),
        steps=40,
        unless=_no_critic,
    ),
)
