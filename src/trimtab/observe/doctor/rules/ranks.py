"""Several devices: work that is dealt unevenly, time that goes into collectives, ranks that were lost."""

from __future__ import annotations

from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom
from trimtab.observe.doctor.rules.common import total
from trimtab.observe.format import number, percent

MAX_IMBALANCE = 1.25
"""FLOPs of the busiest rank over the mean of all, up to which ranks wait little for each other."""
MAX_COMMUNICATION_SHARE = 0.2
"""Share of all time in collectives, from which they are what a step waits for."""


def rank_imbalance(record: Record) -> Symptom | None:
    found = record.now("run/rank_imbalance") or 1.0
    if found <= MAX_IMBALANCE:
        return None
    span = record.span("run/rank_imbalance")
    return Symptom("warn", f"the busiest rank has {number(found, 2)} times the mean (median of {span})")


def communication_share(record: Record) -> Symptom | None:
    share = total(record, "time/communication") / max(total(record, "time/total"), 1e-9)
    if share <= MAX_COMMUNICATION_SHARE:
        return None
    return Symptom("warn", f"{percent(share)} of all time over {record.span('time/communication')}")


def rank_restarts(record: Record) -> Symptom | None:
    found = record.now("run/rank_restarts") or 0.0
    return Symptom("warn", f"{found:.0f} of at most 3 restarts so far") if found else None


RULES = (
    DoctorRule(
        "rank_imbalance",
        "ranks wait for the busiest one",
        unit="FLOPs of the busiest rank over the mean",
        healthy="below 1.25",
        found_when="the median of the last 20 steps is above that",
        cause="a step has few or very unequal samples for so many devices",
        remedy="raise learn.prompts_per_step, or lower run.devices",
        kind="advice",
        check=rank_imbalance,
        needs=("run/rank_imbalance",),
    ),
    DoctorRule(
        "communication_share",
        "the run waits for communication between devices",
        unit="share of all time",
        healthy="below 20 %",
        found_when="above that over the last 20 steps",
        cause="the links between devices are slow for the model's size, or gradients are summed in every micro-batch",
        remedy="set run.shard: optimizer where it fits, raise run.token_budget for fewer micro-batches, or lower run.devices",
        kind="safe",
        check=communication_share,
        needs=("time/communication", "time/total"),
    ),
    DoctorRule(
        "rank_restarts",
        "ranks were lost and started again",
        unit="restarts",
        healthy="0",
        found_when="1 or more",
        cause="a process of a device was killed, crashed or hung; RUN/ranks has its log",
        remedy="read the log of the rank that was named; check the host's memory and the GPU's errors (dmesg, nvidia-smi)",
        kind="advice",
        check=rank_restarts,
        needs=("run/rank_restarts",),
    ),
)
