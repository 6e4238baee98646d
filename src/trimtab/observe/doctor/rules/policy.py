"""Rules for the policy: entropy, KL, ratio, clipping, gradients, and whether engine and trainer agree. Nats per token throughout.

Three distances are kept apart: KL to the reference (kl_ref), KL to the policy that sampled (kl_old), and the engine's distance
from the trainer, which is measured as the mean absolute difference of log-probs and not as a KL.
"""

from __future__ import annotations

from statistics import median

from trimtab.observe.doctor.finding import Level
from trimtab.observe.doctor.record import RECENT_STEPS, Record
from trimtab.observe.doctor.rule import Band, BandSpan, DoctorRule, Symptom
from trimtab.observe.doctor.rules.common import (
    ENTROPY,
    entropy_shift,
    learned,
    nothing_gained,
    on_policy,
    reward_falls,
    reward_levels,
    reward_rises,
    reward_words,
    sudden_fall,
)
from trimtab.observe.format import number, percent

KL_REF, KL_OLD, RATIO = "policy/kl_ref", "policy/kl_old", "policy/ratio_mean"
CLIPPED, NORM, GAP, SKIPPED = "policy/clip_fraction", "policy/grad_norm", "rollout/logprob_gap", "run/skipped_updates"
CLIP_LIMITS = {"clip": (0.1, 0.3), "sequence_clip": (0.5, 0.8), "cispo": (0.05, 0.2), "gspo": (0.5, 0.8)}
"""Share of clipped tokens that is too much, and far too much, by loss: GSPO's bounds are so tight that a seventh is usual, and
the ratio of a whole completion leaves its bounds sooner than that of a token."""
LOST_GRADIENT = 20.0
"""A gradient norm that drops by this factor at once is lost."""
BROKEN = "an update before step {step} was too large: it broke the policy"
START_AGAIN = "lower learn.lr (10 times is a first try), and start again or resume from a checkpoint before step {step}"


def sudden_entropy_loss(record: Record) -> Symptom | None:
    """Within a step or a few, and for good."""
    shift = entropy_shift(record)
    if shift is None or shift.after > min(0.25 * shift.before, 0.3):
        return None
    step = record.shift_step(ENTROPY, shift)
    if not nothing_gained(record, step):
        return None
    seen = f"{number(shift.before)} nats before step {step}, {number(shift.after, 4)} since (medians)"
    return _broken("bad" if shift.after < 0.05 * shift.before else "warn", seen, record, step)


def sudden_entropy_jump(record: Record) -> Symptom | None:
    shift = entropy_shift(record)
    if shift is None or shift.after < shift.before + 0.3:
        return None
    step = record.shift_step(ENTROPY, shift)
    if not nothing_gained(record, step):
        return None
    seen = f"{number(shift.before)} nats before step {step}, {number(shift.after)} since (medians)"
    return _broken("bad" if sudden_fall(record) else "warn", seen, record, step)


def _broken(level: Level, seen: str, record: Record, step: int) -> Symptom:
    levels = reward_levels(record, step)
    words = f"; {levels.words()}" if levels else ""
    return Symptom(level, seen + words, BROKEN.format(step=step), START_AGAIN.format(step=step))


def entropy_collapse(record: Record) -> Symptom | None:
    """A policy that has learned its task is sure of itself, too: a collapse is a low entropy with the reward still wanting."""
    early, now = record.early(ENTROPY) or 0.0, record.now(ENTROPY) or 0.0
    recent = record.recent("reward/mean", 3 * RECENT_STEPS)
    stuck = not reward_rises(record) or (
        len(recent) == 3 * RECENT_STEPS and median(recent[-RECENT_STEPS:]) <= median(recent[:RECENT_STEPS])
    )
    if now > 0.25 * early or now > 0.3 or learned(record) or not stuck or not record.trend(ENTROPY).falls():
        return None
    seen = f"{number(early)} to {number(now, 4)} nats over {record.span(ENTROPY)}; {reward_words(record)}"
    return Symptom("bad" if now < 0.05 * early and not reward_rises(record) else "warn", seen)


def entropy_explosion(record: Record) -> Symptom | None:
    line = record.trend(ENTROPY)
    if not line.rises(max(0.3, line.start)) or reward_rises(record):
        return None
    seen = f"{number(line.start)} to {number(line.end)} nats (fitted); {reward_words(record)}"
    return Symptom("bad" if reward_falls(record) else "warn", seen)


def kl_to_reference(record: Record) -> Symptom | None:
    """KL that rises with the reward is what learning costs; KL that rises alone buys nothing."""
    now, line = record.now(KL_REF) or 0.0, record.trend(KL_REF)
    if now <= 0.15 or not line.rises(0.05) or reward_rises(record):
        return None
    seen = (
        f"{number(line.start, 4)} to {number(line.end, 4)} nats (fitted), now {number(now, 4)}; {reward_words(record)}"
    )
    return Symptom("bad" if reward_falls(record) or now > 1.0 else "warn", seen)


def far_from_reference(record: Record) -> Symptom | None:
    """A nat a token is another model: there is no need to wait for a trend."""
    recent = record.recent(KL_REF, 5)
    if min(recent) <= 1.0 or reward_rises(record) or learned(record):
        return None
    return Symptom("bad", f"{number(median(recent))} nats (median of {record.span(KL_REF, 5)}); {reward_words(record)}")


def step_size(record: Record) -> Symptom | None:
    now = record.now(KL_OLD) or 0.0
    if now <= 0.02:
        return None
    seen = f"{number(now, 4)} nats (median of {record.span(KL_OLD)}), {record.updates_per_batch} updates per batch"
    return Symptom("bad" if now > 0.1 else "warn", seen)


def ratio(record: Record) -> Symptom | None:
    recent = record.recent(RATIO)
    if record.updates_per_batch == 1:
        off = max(recent, key=lambda value: abs(value - 1))
        if abs(off - 1) < 1e-3:
            return None
        why = "with one update per batch the ratio must be 1, but the update computes other log-probs than the step did"
        return Symptom(
            "bad", f"{number(off, 5)} over {record.span(RATIO)}", why, "this is a bug in Trimtab: please report it"
        )
    off = abs(median(recent) - 1)
    if off <= 0.1:
        return None
    return Symptom("bad" if off > 0.5 else "warn", f"{number(median(recent))} (median of {record.span(RATIO)})")


def clipping(record: Record) -> Symptom | None:
    loss = record.setting("learn.loss", "clip")
    much, far_too_much = CLIP_LIMITS.get(loss, CLIP_LIMITS["clip"])
    now = record.now(CLIPPED) or 0.0
    if now <= much:
        return None
    limit = f"the loss {loss} should stay below {percent(much)}"
    seen = f"{percent(now, 1)} of tokens (median of {record.span(CLIPPED)}); {limit}"
    return Symptom("bad" if now > far_too_much else "warn", seen)


def gradient_spikes(record: Record) -> Symptom | None:
    """Against the twenty steps before each; a lognormal noise of factor two makes less than one in a hundred runs look so."""
    points = record.points(NORM)
    spikes = [
        (step, value)
        for at, (step, value) in enumerate(points)
        if at >= RECENT_STEPS and value > 10 * median(before for _, before in points[at - RECENT_STEPS : at]) > 0
    ]
    late = [spike for spike in spikes if spike[0] > points[-1][0] - 100]
    early, now = record.early(NORM) or 0.0, record.now(NORM) or 0.0
    if now > 10 * early > 0 and record.trend(NORM).rises():
        return Symptom("bad", f"grew from {number(early)} to {number(now)} (medians of the first and the last steps)")
    if len(late) < 3:
        return None
    some = ", ".join(f"{number(value)} at step {step}" for step, value in late[-3:])
    return Symptom("warn", f"{len(late)} of the last 100 steps above ten times the median before: {some}")


def _no_gradient(record: Record) -> str | None:
    recent = record.recent(NORM)
    return "the gradient is 0 in most of the last steps" if recent and not median(recent) else None


def gradient_lost(record: Record) -> Symptom | None:
    """At once and for good. After a step or two it may be luck that there was one, unless the entropy changed as well."""
    shift = record.shift(NORM, LOST_GRADIENT)
    if shift is None or shift.after > shift.before or learned(record):
        return None
    entropy = entropy_shift(record)
    if shift.at < 3 and (entropy is None or entropy.after > entropy.before):
        return None
    step = record.shift_step(NORM, shift)
    if not nothing_gained(record, step):
        return None
    seen = f"{number(shift.before)} before step {step}, {number(shift.after, 4)} since (medians)"
    return _broken("warn", seen, record, step) if entropy else Symptom("warn", seen)


def gradient_drop(record: Record) -> Symptom | None:
    """The last ten steps all below the forty before. Groups that lost their signal explain it, and have a rule of their own."""
    values = record.values(NORM)
    before, last = values[-50:-10], values[-10:]
    lost_signal = (record.trend("reward/zero_std_groups").change > 0.1) or learned(record)
    if (
        not median(before)
        or median(last) > median(before) / 3
        or max(last) > sorted(before)[len(before) // 10]
        or lost_signal
    ):
        return None
    return Symptom(
        "warn", f"median {number(median(before), 4)} before, {number(median(last), 4)} in {record.span(NORM, 10)}"
    )


def skipped(record: Record) -> Symptom | None:
    places = [step for step, value in record.points(SKIPPED) if value > 0]
    if not places:
        return None
    many = len(places) > 0.01 * len(record.values(SKIPPED)) and len(places) > 1
    seen = f"{len(places)} of {len(record.values(SKIPPED))} steps had an update that was not applied, the last step {places[-1]}"
    return Symptom("bad" if many else "warn", seen)


def _limits(record: Record) -> tuple[str, float, float]:
    """The precision, and a distance between engine and trainer that is too much, and one that is far too much."""
    return ("bfloat16", 0.08, 0.2) if record.half_precision else ("float32", 1e-3, 1e-2)


def _whole(record: Record, metric: str, text: str, low: float | None = None, high: float | None = None) -> Band | None:
    """A band over all steps."""
    steps = record.steps
    return Band(metric, text, (BandSpan(steps[0], steps[-1], low, high),)) if steps else None


def gap_band(record: Record) -> Band | None:
    kind, much, _ = _limits(record)
    return _whole(record, GAP, f"{kind}: below {much:g}", high=much)


def norm_band(record: Record) -> Band | None:
    usual = record.now(NORM)
    return _whole(record, NORM, "no spikes of 10 × its median", high=10 * usual) if usual else None


def entropy_band(record: Record) -> Band | None:
    early = record.early(ENTROPY)
    if not early or learned(record):
        return None
    return _whole(record, ENTROPY, "above a quarter of its beginning, or the reward rises", low=min(0.25 * early, 0.3))


def clip_band(record: Record) -> Band | None:
    if record.updates_per_batch == 1:
        return None
    much = CLIP_LIMITS.get(record.setting("learn.loss", "clip"), CLIP_LIMITS["clip"])[0]
    return _whole(record, CLIPPED, f"below {percent(much).replace('%', ' %')}", high=much)


def old_band(record: Record) -> Band | None:
    return _whole(record, KL_OLD, "below 0.02", high=0.02) if record.updates_per_batch > 1 else None


def mismatch(record: Record) -> Symptom | None:
    """Mean |difference of log-probs|. In bfloat16 0.01 to 0.05 is rounding (docs/log.md); in float32 1e-7 is."""
    kind, much, far_too_much = _limits(record)
    now, line = record.now(GAP) or 0.0, record.trend(GAP)
    grows = line.rises(max(abs(line.start), much / 8))
    if now <= much and not grows:
        return None
    seen = f"{number(now, 5)} nats (median of {record.span(GAP)}), {kind}"
    if grows:
        seen += f"; grew from {number(line.start, 5)} to {number(line.end, 5)} (fitted)"
    return Symptom("bad" if now > far_too_much else "warn", seen)


RULES = (
    DoctorRule(
        "entropy_collapse",
        "entropy collapses before the task is learned",
        unit="nats per token",
        healthy="falls while the reward rises, but stays above a quarter of its first value until success is above 85 %",
        found_when="below 0.3 and below 25 % of its first value, and the reward no longer rises; bad below 5 %; a sudden fall is "
        "found from step 5 on",
        cause="clipping is symmetric, the learning rate is high, a batch is used for many updates, or the sampling "
        "temperature is low",
        remedy="set learn.clip.high to 0.28 (DAPO); lower learn.lr; use fewer updates per batch; sample at temperature 1; set"
        " a small learn.entropy_coef",
        kind="advice",
        check=entropy_collapse,
        band=entropy_band,
        sudden=sudden_entropy_loss,
        needs=(ENTROPY, "reward/mean"),
        steps=30,
    ),
    DoctorRule(
        "entropy_explosion",
        "entropy explodes",
        unit="nats per token",
        healthy="falls or stays level",
        found_when="the fitted entropy doubled and rose by 0.3 while the reward did not rise, or it rose fourfold at one "
        "step; bad if the reward fell",
        cause="the learning rate is too high, the entropy bonus is too large, or engine and trainer disagree",
        remedy="lower learn.entropy_coef or learn.lr; see the rule mismatch",
        kind="advice",
        check=entropy_explosion,
        sudden=sudden_entropy_jump,
        needs=(ENTROPY, "reward/mean"),
        steps=20,
    ),
    DoctorRule(
        "kl_ref",
        "the policy drifts from the reference without gaining reward",
        unit="KL to the reference, nats per token",
        healthy="below 0.15, or rising with the reward",
        found_when="above 0.15 and rising while the reward does not; bad if the reward falls, or if it is above 1 in each of "
        "the last 5 steps",
        cause="the learning rate is too high, a batch is used for too many updates, or the policy exploits the reward",
        remedy="raise learn.kl.coef; lower learn.lr; set learn.max_grad_norm to 0.5",
        kind="advice",
        check=kl_to_reference,
        sudden=far_from_reference,
        needs=(KL_REF, "reward/mean"),
        steps=20,
    ),
    DoctorRule(
        "kl_old",
        "policy updates are too large",
        unit="KL to the policy that sampled, nats per token",
        healthy="below 0.02 (0 with one update per batch)",
        found_when="the median of the last 20 steps is above 0.02; bad above 0.1",
        cause="the learning rate is too high, or a batch is used for too many updates",
        remedy="lower learn.lr, learn.updates_per_step or learn.epochs_per_step",
        kind="advice",
        check=step_size,
        band=old_band,
        needs=(KL_OLD,),
        unless=on_policy,
    ),
    DoctorRule(
        "ratio",
        "the policy ratio is far from 1",
        unit="mean ratio of new to old probability",
        healthy="1 with one update per batch; 0.9 to 1.1 with more",
        found_when="the median of the last 20 steps is outside that range; bad outside 0.5 to 1.5, and with one update per "
        "batch if it is off by 0.1 %",
        cause="updates are too large, or the old log-probs are not those of the old policy",
        remedy="use fewer updates per batch; lower learn.lr; set learn.old_logprobs: trainer",
        kind="advice",
        check=ratio,
        needs=(RATIO,),
    ),
    DoctorRule(
        "clipping",
        "too many tokens are clipped",
        unit="share of tokens whose ratio is clipped (not the share of truncated responses)",
        healthy="0 with one update per batch; below 10 % with more; up to 50 % is usual for GSPO",
        found_when="the median of the last 20 steps is above 10 % (cispo 5 %, gspo 50 %); bad above 30 % (cispo 20 %, gspo 80 %)",
        cause="the learning rate is too high, or a batch is used for too many updates",
        remedy="lower learn.lr, learn.updates_per_step or learn.epochs_per_step",
        kind="advice",
        check=clipping,
        band=clip_band,
        needs=(CLIPPED,),
        unless=on_policy,
    ),
    DoctorRule(
        "gradient_spikes",
        "gradient norm spikes",
        unit="gradient norm before clipping",
        healthy="steady: it changes by a small factor only",
        found_when="3 of the last 100 steps are above ten times the median of the 20 steps before them; bad if it stays ten "
        "times as high",
        cause="a few unusual samples, a learning rate that is too high, or an engine and a trainer that disagree",
        remedy="lower learn.lr; set learn.max_grad_norm to 0.5; read RUN/samples of those steps",
        kind="advice",
        check=gradient_spikes,
        band=norm_band,
        unless=_no_gradient,
        needs=(NORM,),
        steps=25,
    ),
    DoctorRule(
        "gradient_drop",
        "gradient norm drops suddenly",
        unit="gradient norm before clipping",
        healthy="steady: it changes by a small factor only",
        found_when="the last 10 steps are at most a third of the 40 before, while groups still have signal; or it drops to a "
        "twentieth at one step and stays there",
        cause="the policy repeats itself, or rewards stopped differing within groups; often a collapse follows",
        remedy="read RUN/samples of the last steps; evaluate; go back to an earlier checkpoint if the samples are worse",
        kind="advice",
        check=gradient_drop,
        sudden=gradient_lost,
        needs=(NORM,),
        steps=50,
    ),
    DoctorRule(
        "skipped_updates",
        "gradients are not finite",
        unit="steps with a skipped update",
        healthy="none",
        found_when="one or more; bad if there are several and more than 1 % of steps",
        cause="overflow: the learning rate is too high, ratios explode, or weights became too large",
        remedy="lower learn.lr; see the rules ratio and mismatch; resume from a checkpoint before the first skipped update",
        kind="advice",
        check=skipped,
        needs=(SKIPPED,),
        steps=1,
    ),
    DoctorRule(
        "mismatch",
        "engine and trainer disagree",
        unit="mean |log-prob of the engine - of the trainer|, nats per token",
        healthy="bfloat16: below 0.08 (dense models 0.01 to 0.05); float32: below 0.001; steady",
        found_when="above that limit, or doubled; bad above 0.2 (float32: 0.01)",
        cause="rounding errors grow with the weights, experts are routed differently, or the engine lacks the newest weights",
        remedy="set learn.importance.level: token (truncated correction); try model.dtype: float32 as a test; if it jumps, "
        "report it",
        kind="advice",
        check=mismatch,
        band=gap_band,
        needs=(GAP,),
    ),
)
