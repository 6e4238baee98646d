"""Rules for conversations: environments that fail or are slow, malformed tool calls, and conversations that run out of turns."""

from __future__ import annotations

from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom
from trimtab.observe.doctor.rules.common import total
from trimtab.observe.format import duration, percent

FAILED, MALFORMED, LIMIT, WAIT = (
    f"environment/{name}" for name in ("failed", "tool_malformed_share", "turn_limit", "wait_s")
)


def failed(record: Record) -> Symptom | None:
    lost, samples = total(record, FAILED), total(record, "run/samples")
    share = lost / samples if samples else 0.0
    if share <= 0.01:
        return None
    seen = f"{lost:.0f} of {samples:.0f} samples ({percent(share, 1)}) over {record.span(FAILED)}"
    return Symptom("bad" if share > 0.05 else "warn", seen)


def malformed(record: Record) -> Symptom | None:
    share = record.mean(MALFORMED) or 0.0
    if share <= 0.2:
        return None
    return Symptom("bad" if share > 0.5 else "warn", f"{percent(share)} of tool calls over {record.span(MALFORMED)}")


def turn_limit(record: Record) -> Symptom | None:
    share = record.mean(LIMIT) or 0.0
    if share <= 0.2:
        return None
    most = record.setting("environment.max_turns", 0)
    return Symptom(
        "warn", f"{percent(share)} of completions over {record.span(LIMIT)}" + (f", at {most} turns" if most else "")
    )


def waiting(record: Record) -> Symptom | None:
    waited, whole = total(record, WAIT), total(record, "time/total")
    if not whole or waited <= 0.2 * whole:
        return None
    return Symptom(
        "warn", f"{percent(waited / whole)} of the time, {duration(record.mean(WAIT))} a step, over {record.span(WAIT)}"
    )


def _alone(record: Record) -> str | None:
    return None if record.values("environment/turns_mean") else "no environment"


def _no_tools(record: Record) -> str | None:
    return _alone(record) or (None if record.values(MALFORMED) else "no tool was called")


RULES = (
    DoctorRule(
        "environment_failed",
        "the environment fails",
        unit="share of samples dropped because the environment failed",
        healthy="below 1 %",
        found_when="more than 1 % over the last 20 steps; bad above 5 %",
        cause="the environment raises, times out or crashes on some completions; the remaining samples are biased",
        remedy="find the failures in RUN/samples (field `failure`) and handle them in the environment; raise its timeout_s if "
        "they are timeouts",
        kind="advice",
        check=failed,
        needs=(FAILED, "run/samples"),
        unless=_alone,
    ),
    DoctorRule(
        "tool_calls_malformed",
        "tool calls are malformed",
        unit="share of tool calls that cannot be parsed",
        healthy="below 20 %, and falling",
        found_when="above 20 % over the last 20 steps; bad above 50 %",
        cause='the model does not know the format <tool_call>{"name": ..., "arguments": {...}}</tool_call>, or its chat '
        "template uses another",
        remedy="read RUN/samples; show the format in data.system, or first teach it with trimtab sft",
        kind="advice",
        check=malformed,
        needs=(MALFORMED,),
        unless=_no_tools,
    ),
    DoctorRule(
        "turn_limit",
        "conversations run out of turns",
        unit="share of completions that reach environment.max_turns",
        healthy="below 20 %",
        found_when="above 20 % over the last 20 steps",
        cause="the task takes more turns than are allowed, or the model does not know when to stop",
        remedy="raise environment.max_turns (and learn.max_new_tokens if replies are long), or reward early endings",
        kind="advice",
        check=turn_limit,
        needs=(LIMIT,),
        unless=_alone,
    ),
    DoctorRule(
        "environment_wait",
        "sampling waits for environments",
        unit="share of the time",
        healthy="below 20 %",
        found_when="above 20 % over the last 20 steps",
        cause="environment calls take longer than decoding the other conversations",
        remedy="raise run.reward_workers (environments run in as many processes), or make the environment's step faster",
        kind="safe",
        check=waiting,
        needs=(WAIT, "time/total"),
        unless=_alone,
    ),
)
