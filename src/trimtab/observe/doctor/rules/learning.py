"""Is it learning: reward, evaluation, and whether they say the same."""

from __future__ import annotations

from trimtab.observe.doctor.record import RECENT_STEPS, Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom
from trimtab.observe.doctor.rules.common import (
    REWARD,
    learned,
    never_differed,
    reward_falls,
    reward_rises,
    solved_before,
    spread,
    sudden_fall,
)
from trimtab.observe.format import duration, number, percent

SCORE = "eval/pass@1"
LOSSES = ("policy/loss", "sft/loss", "rm/loss", "policy/grad_norm")


def reward_falls_check(record: Record) -> Symptom | None:
    return Symptom("bad", _reward_seen(record)) if reward_falls(record) else None


def sudden_reward_fall(record: Record) -> Symptom | None:
    """A fall at one step; or evaluation before training saw successes where training has never seen one."""
    last = record.points("reward/mean")[-1][0]
    if fall := sudden_fall(record):
        seen = f"{number(fall.before)} before step {fall.step}, {number(fall.after)} in steps {fall.step} to {last} (means)"
        broken = (
            f"an update before step {fall.step} was too large and broke the policy, or data or reward changed there"
        )
        fix = f"lower learn.lr, and start again or resume from a checkpoint before step {fall.step}"
        return Symptom("bad", seen, broken, fix)
    before = solved_before(record)
    if before is None or not never_differed(record) or any(record.values("reward/mean")):
        return None
    seen = f"evaluation before training solved {percent(before, 1)}; no sample of steps {record.steps[0]} to {last} did"
    return Symptom(
        "bad",
        seen,
        "the first updates broke the policy, or training and evaluation sample with different settings",
        "lower learn.lr; compare learn.sampling and learn.max_new_tokens with eval's, and data.train with data.eval",
    )


def reward_flat(record: Record) -> Symptom | None:
    if reward_rises(record) or reward_falls(record) or learned(record):
        return None
    return Symptom("warn", f"{_reward_seen(record)}; any rise is within the noise")


def not_finite(record: Record) -> Symptom | None:
    """Steps whose update was skipped have a rule of their own."""
    told = _without_number(record)
    recent = record.steps[-RECENT_STEPS:]
    now = [step for step, _ in told if step >= recent[0]]
    if not now:
        return None
    which = ", ".join(dict.fromkeys(name for step, found in told if step >= recent[0] for name in found))
    seen = f"{which} in {len(now)} of steps {recent[0]} to {recent[-1]}; first at step {told[0][0]}"
    return Symptom("bad" if len(now) > 1 else "warn", seen)


def _without_number(record: Record) -> list[tuple[int, list[str]]]:
    """Steps, with those metrics of what is learned from that were written there, but as no number."""
    bad = {name: record.wrote_no_number(name) for name in (*REWARD, *LOSSES)}
    skipped = {step for step, updates in record.points("run/skipped_updates") if updates > 0}
    found = [
        (step, [name for name in bad if step in bad[name] and (name in REWARD or step not in skipped)])
        for step in record.steps
    ]
    return [(step, names) for step, names in found if names]


def _without_numbers(record: Record) -> str | None:
    known = any(name in record.metrics.names for name in (*REWARD, *LOSSES))
    return None if known else "needs a reward or a loss"


def _reward_seen(record: Record) -> str:
    line, steps = record.trend("reward/mean"), len(record.values("reward/mean"))
    apart = f"the rewards of a step differ by {number(spread(record))} (std)"
    return f"{number(line.start)} to {number(line.end)} (fitted) over {steps} steps; {apart}"


def eval_behind(record: Record) -> Symptom | None:
    """The mean of the last two evaluations against the first one, in standard errors."""
    scores, rewards = record.points(SCORE), record.trend("reward/mean")
    gain = rewards.change / spread(record) if spread(record) else 0.0
    if not reward_rises(record) or gain < 0.5 or learned(record):
        return None
    error = max(record.now("eval/stderr") or 0.0, 1e-3)
    moved = (scores[-2][1] + scores[-1][1]) / 2 - scores[0][1]
    if moved > error:
        return None
    seen = (
        f"reward {number(rewards.start)} to {number(rewards.end)}, {number(gain, 1)} std of a step's samples; pass@1 "
        f"{percent(scores[0][1], 1)} at step {scores[0][0]}, {percent(scores[-1][1], 1)} at step {scores[-1][0]} "
        f"(±{percent(error, 1)}), {len(scores)} evaluations"
    )
    return Symptom("bad" if moved < -2 * error else "warn", seen)


def eval_past_best(record: Record) -> Symptom | None:
    """Four standard errors of a difference: the best of many evaluations is lucky, too."""
    scores = record.points(SCORE)
    best, first, last = max(scores, key=lambda point: point[1]), scores[0], scores[-1]
    error = max(record.now("eval/stderr") or 0.0, 1e-3) * 2**0.5
    if best[1] - last[1] < 4 * error:
        return None
    seen = f"{percent(best[1], 1)} at step {best[0]}, {percent(last[1], 1)} at step {last[0]} (±{percent(error, 1)})"
    if first[1] - last[1] < 4 * error:
        return Symptom("warn", seen)
    began = f"{seen}; it began with {percent(first[1], 1)}" if first != best else seen
    worse = "training has made the policy worse than it was before the first step"
    return Symptom("bad", began, worse, "lower learn.lr; check the reward against what evaluation counts as success")


def stalled(record: Record) -> Symptom | None:
    """Twenty steps' time and a minute without a row; the longest step so far counts, as evaluations and checkpoints do."""
    wanted, last = record.setting("learn.steps", 0), record.steps[-1]
    usual = max(record.values("time/total"))
    if record.finished or not wanted or last >= wanted or record.quiet_s < 60 + 20 * usual:
        return None
    resume = f"its newest checkpoint is {record.checkpoint}" if record.checkpoint else "it has no checkpoint yet"
    seen = (
        f"step {last} of {wanted}, then nothing for {duration(record.quiet_s)}; its longest step took {duration(usual)}"
    )
    return Symptom("bad", f"{seen}; {resume}")


RULES = (
    DoctorRule(
        "stalled",
        "no new step for a long time",
        unit="seconds",
        healthy="a row of metrics every step until the last",
        found_when="the run is not finished and wrote nothing for 20 times its longest step and a minute",
        cause="it was killed (out of memory, a time limit), raised an error, or hangs",
        remedy="read the end of its output; continue with trimtab train CONFIG --resume",
        kind="safe",
        check=stalled,
        needs=("time/total",),
        steps=1,
    ),
    DoctorRule(
        "not_finite",
        "reward, loss or gradient is not finite",
        unit="steps",
        healthy="a finite number in every step",
        found_when="null or NaN in one of the last 20 steps without a skipped update; bad in more than one",
        cause="no sample of the step has a reward, or weights or updates became too large",
        remedy="read RUN/samples of those steps; lower learn.lr; resume from a checkpoint before the first of them",
        kind="advice",
        check=not_finite,
        needs=("time/total",),
        steps=1,
        unless=_without_numbers,
    ),
    DoctorRule(
        "reward_falls",
        "reward falls",
        unit="mean reward of a step",
        healthy="rises over hundreds of steps, until success is above 85 %",
        found_when="a downward trend over the whole run by a tenth of the std of a step's rewards; or a lasting fall at one step "
        "by half of that std or to a quarter; or no sample succeeds although the evaluation before training solved some"
        " prompts",
        cause="updates are too large or go in the wrong direction: the learning rate is too high, a reward has the wrong "
        "sign, or the engine's log-probs are off",
        remedy="lower learn.lr; check the sign of each reward part; see entropy_collapse, kl_ref and mismatch",
        kind="advice",
        check=reward_falls_check,
        sudden=sudden_reward_fall,
        needs=REWARD,
        steps=20,
    ),
    DoctorRule(
        "reward_flat",
        "reward does not rise",
        unit="mean reward of a step",
        healthy="rises over hundreds of steps, until success is above 85 %",
        found_when="no trend over the whole run, which has at least 50 steps",
        cause="prompts are too hard or too easy, the learning rate or the batch is too small, or the reward cannot tell "
        "answers apart",
        remedy="read RUN/samples; use prompts that the model solves sometimes; raise learn.lr or learn.prompts_per_step; "
        "warm-start by supervised training; as a test that learning works at all, train on a few prompts",
        kind="advice",
        check=reward_flat,
        needs=REWARD,
        steps=50,
    ),
    DoctorRule(
        "eval_behind",
        "reward rises, evaluation does not",
        unit="pass@1 against mean reward",
        healthy="they move together",
        found_when="the reward rose by half a std of a step's rewards, but pass@1 by less than its standard error; bad if "
        "pass@1 fell",
        cause="the policy exploits the reward, memorises the training prompts, or the training and evaluation data differ",
        remedy="read RUN/samples to see what is rewarded; make the reward stricter; add data; set learn.kl.coef to 0.001",
        kind="advice",
        check=eval_behind,
        needs=(SCORE, "reward/mean", "reward/std"),
        steps=3,
    ),
    DoctorRule(
        "eval_past_best",
        "evaluation is past its best",
        unit="pass@1",
        healthy="the last evaluation is among the best",
        found_when="the last evaluation is four standard errors of a difference below the best; bad if it is as far below the"
        " first",
        cause="training continued after the policy began to get worse",
        remedy="use the best checkpoint: trimtab export RUN FOLDER --checkpoint best; next time lower learn.steps or learn.lr",
        kind="advice",
        check=eval_past_best,
        needs=(SCORE,),
        steps=2,
    ),
)
