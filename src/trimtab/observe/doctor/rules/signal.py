"""What there is to learn from: groups with signal, rewards that fail or dawdle, responses that are cut, grow or vanish."""

from __future__ import annotations

from trimtab.observe.doctor.finding import Level
from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import Band, BandSpan, DoctorRule, Symptom, steady_band
from trimtab.observe.doctor.rules.common import (
    ENTROPY,
    learned,
    learned_since,
    never_differed,
    nothing_gained,
    reward_falls,
    reward_rises,
    reward_words,
    solved_before,
    success_rate,
    total,
)
from trimtab.observe.format import duration, number, percent

REPEATING_BELOW_NATS = 0.01
"""Nats per token below which samples of a prompt are nearly always the same."""
LENGTH, CUT, ZERO = "response/length_mean", "response/truncated", "reward/zero_std_groups"


def zero_signal(record: Record) -> Symptom | None:
    """Compared with what one success rate for all prompts would give, p^G + (1-p)^G: the least that is possible."""
    share = record.mean(ZERO) or 0.0
    if share <= (0.9 if learned(record) else 0.7 if reward_rises(record) else 0.5):
        return None
    rate, size = success_rate(record), record.setting("learn.samples_per_prompt", 0)
    seen = f"{percent(share)} of groups over {record.span(ZERO)}"
    level: Level = "bad" if share > 0.9 and not learned(record) else "warn"
    if share > 0.999 and (lost := _lost(record)):
        return Symptom("bad", seen + lost[0], *lost[1:])
    if rate is None or not size:
        return Symptom(level, seen)
    least = rate**size + (1 - rate) ** size
    seen += f"; with {percent(rate)} success and groups of {size}, {percent(least)} is the least possible"
    if share < least + 0.15:
        side = "hard" if rate < 0.5 else "easy"
        return Symptom(level, seen, f"prompts are too {side} for groups of {size}")
    return Symptom(level, seen, "prompts differ: some are always solved, some never")


def signal_band(record: Record) -> Band | None:
    """70 % while the reward rises, 50 % while it does not; 90 % from the step on at which the task is learned."""
    if not record.steps:
        return None
    first, last = record.steps[0], record.steps[-1]
    now = 0.7 if reward_rises(record) or learned(record) else 0.5
    text, since = f"below {percent(now).replace('%', ' %')}", learned_since(record)
    if since is None:
        return Band(ZERO, text, (BandSpan(first, last, high=now),))
    spans = (BandSpan(first, since, high=now), BandSpan(since, last, high=0.9))
    return Band(ZERO, f"{text}; once solved, 90 %", spans if since > first else spans[1:])


def _lost(record: Record) -> tuple[str, str, str] | None:
    """What was seen, the cause and the remedy where no group has signal any more: the policy repeats itself, or all rewards are
    equal, which is the reward's fault only where they never differed."""
    lower = "lower learn.lr, and start again or resume from a checkpoint before that"
    differed = [step for step, std in record.points("reward/std") if std]
    entropy = record.recent(ENTROPY)
    if differed and entropy and max(entropy) < REPEATING_BELOW_NATS:
        shown = f"; the entropy is {number(max(entropy), 4)} nats at most"
        return shown, "the policy has collapsed: all samples of a prompt are the same", lower
    if total(record, "reward/std"):
        return None
    if differed:
        shown = f"; rewards differed until step {differed[-1]}"
        return (
            shown,
            f"the policy became worse at about step {differed[-1]}: since then all rewards of a group are equal",
            lower,
        )
    before = solved_before(record)
    if before is not None and never_differed(record):
        shown = f"; evaluation before training solved {percent(before, 1)}"
        broken = "the first updates broke the policy, or training and evaluation sample with different settings"
        return shown, broken, "lower learn.lr; compare learn.sampling and learn.max_new_tokens with eval's"
    broken = "every sample has the same reward: the reward is constant, or does not look at the answer"
    return "", broken, "call the reward by hand on two completions of RUN/samples that should differ"


def _not_compared(record: Record) -> str | None:
    return None if record.values(ZERO) else "samples are not compared within their groups"


def refills(record: Record) -> Symptom | None:
    most, now = record.setting("learn.dynamic_sampling.max_refills", 0), record.mean("rollout/refills") or 0.0
    if not most or now < 0.8 * most:
        return None
    return Symptom("warn", f"{number(now, 1)} of {most} refills per step over {record.span('rollout/refills')}")


def _unfiltered(record: Record) -> str | None:
    return None if record.setting("learn.dynamic_sampling.enabled", False) else "no dynamic sampling"


def reward_failed(record: Record) -> Symptom | None:
    failed, samples = total(record, "reward/failed"), total(record, "run/samples")
    share = failed / samples if samples else 0.0
    if share <= 0.01:
        return None
    seen = f"{failed:.0f} of {samples:.0f} samples ({percent(share, 1)}) over {record.span('reward/failed')}"
    return Symptom("bad" if share > 0.05 else "warn", seen)


def reward_deadline(record: Record) -> Symptom | None:
    parts = record.settings.get("reward")
    limits = [part.get("timeout_s") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    known = [limit for limit in limits if isinstance(limit, int | float)]
    slowest = max(record.recent("reward/latency_max_s"))
    if not known or slowest < 0.5 * max(known):
        return None
    return Symptom("warn", f"the slowest call took {duration(slowest)}, its deadline is {duration(float(max(known)))}")


def truncation(record: Record) -> Symptom | None:
    now, line = record.mean(CUT) or 0.0, record.trend(CUT)
    rising = line.rises(0.03)
    if now <= 0.05 and not (rising and now > 0.02):
        return None
    limit = record.setting("learn.max_new_tokens", 0)
    seen = f"{percent(now, 1)} of responses over {record.span(CUT)}" + (f", at {limit} tokens" if limit else "")
    if rising:
        seen += f"; rose from {percent(line.start, 1)} to {percent(line.end, 1)} (fitted)"
    return Symptom("bad" if now > 0.2 and not reward_rises(record) else "warn", seen)


def length_grows(record: Record) -> Symptom | None:
    line = record.trend(LENGTH)
    if not line.rises(0.5 * max(line.start, 1.0)) or reward_rises(record):
        return None
    seen = f"{number(line.start, 1)} to {number(line.end, 1)} tokens (fitted); {reward_words(record)}"
    return Symptom("bad" if reward_falls(record) else "warn", seen)


def length_collapses(record: Record) -> Symptom | None:
    line, early, now = record.trend(LENGTH), record.early(LENGTH) or 0.0, record.now(LENGTH) or 0.0
    if not line.sure or now > 0.4 * early or reward_rises(record):
        return None
    seen = f"{number(early, 1)} to {number(now, 1)} tokens; {reward_words(record)}"
    return Symptom("bad" if reward_falls(record) else "warn", seen)


def sudden_length(record: Record, grows: bool) -> Symptom | None:
    shift = record.shift(LENGTH)
    if shift is None or grows != (shift.after > shift.before):
        return None
    step = record.shift_step(LENGTH, shift)
    if not nothing_gained(record, step):
        return None
    seen = f"{number(shift.before, 1)} tokens before step {step}, {number(shift.after, 1)} since (medians)"
    level: Level = "bad" if reward_falls(record) else "warn"
    return Symptom(level, f"{seen}; {reward_words(record)}")


RULES = (
    DoctorRule(
        "zero_signal",
        "groups without signal",
        unit="share of groups whose rewards are all equal",
        healthy="below 50 %; below 70 % while the reward rises, 90 % once success is above 85 %",
        found_when="the mean of the last 20 steps is above that; bad above 90 % before the task is learned",
        cause="prompts that are always or never solved, a constant reward, or samples that are all the same",
        remedy="use prompts that the model solves sometimes; raise learn.samples_per_prompt; set "
        "learn.dynamic_sampling.enabled: true; sample at temperature 1",
        kind="advice",
        check=zero_signal,
        band=signal_band,
        needs=(ZERO,),
        unless=_not_compared,
    ),
    DoctorRule(
        "refills",
        "dynamic sampling finds too few prompts",
        unit="refills per step",
        healthy="well below learn.dynamic_sampling.max_refills",
        found_when="80 % of the allowed refills are used on average over the last 20 steps",
        cause="most groups have no signal, so most of what is generated is thrown away",
        remedy="use prompts of fitting difficulty, or larger groups (learn.samples_per_prompt)",
        kind="advice",
        check=refills,
        needs=("rollout/refills",),
        unless=_unfiltered,
    ),
    DoctorRule(
        "reward_failed",
        "rewards fail",
        unit="share of samples without a reward",
        healthy="below 1 %",
        found_when="more than 1 % over the last 20 steps; bad above 5 %",
        cause="the reward raises or times out on some completions; what is left is a biased sample",
        remedy="find the failures in RUN/samples (field `failure`) and handle them in the reward; raise the part's timeout_s if "
        "they are timeouts",
        kind="advice",
        check=reward_failed,
        needs=("reward/failed", "run/samples"),
    ),
    DoctorRule(
        "reward_deadline",
        "reward calls come close to their deadline",
        unit="seconds of the slowest call",
        healthy="below half of the part's timeout_s",
        found_when="a call of the last 20 steps took longer than half of the longest deadline",
        cause="calls that take longer still are ended, and their samples dropped: those are not random ones",
        remedy="make the reward faster, or raise the part's timeout_s",
        kind="advice",
        check=reward_deadline,
        needs=("reward/latency_max_s",),
    ),
    DoctorRule(
        "truncation",
        "responses are cut off",
        unit="share of responses that reach learn.max_new_tokens (not PPO's clipping)",
        healthy="below 5 % and not rising",
        found_when="above 5 % over the last 20 steps, or rising by 3 points to above 2 %; bad above 20 % "
        "while the reward does not rise",
        cause="learn.max_new_tokens too small, no stop token learned or set, or length that is rewarded",
        remedy="raise learn.max_new_tokens (memory is planned again); set learn.sampling.stop; or learn.overlong, a soft penalty",
        kind="advice",
        check=truncation,
        band=steady_band(CUT, "below 5 % and not rising", high=0.05),
        needs=(CUT,),
    ),
    DoctorRule(
        "length_grows",
        "responses grow without gaining reward",
        unit="tokens per response",
        healthy="steady, or growing with the reward",
        found_when="the fitted length grew by half while the reward did not rise, or it grew fourfold at one step; bad if the "
        "reward fell",
        cause="the loss favours length (learn.aggregate: sequence_mean), or the reward does",
        remedy="set learn.aggregate to token_mean or constant; set learn.overlong",
        kind="advice",
        check=length_grows,
        sudden=lambda record: sudden_length(record, grows=True),
        needs=(LENGTH, "reward/mean"),
        steps=20,
    ),
    DoctorRule(
        "length_collapses",
        "responses shrink without gaining reward",
        unit="tokens per response",
        healthy="steady, or shrinking while the reward rises",
        found_when="the length fell below 40 % of its early value while the reward did not rise, or to a quarter at one step;"
        " bad if the reward fell",
        cause="ending at once earns the most: the reward has a bug, or updates are too large",
        remedy="read RUN/samples; check the reward of an empty answer; lower learn.lr",
        kind="advice",
        check=length_collapses,
        sudden=lambda record: sudden_length(record, grows=False),
        needs=(LENGTH, "reward/mean"),
        steps=20,
    ),
)
