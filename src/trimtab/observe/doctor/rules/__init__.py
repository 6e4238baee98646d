"""The rules of `trimtab doctor RUN`, in the order of the report: first what is learned, then how fast."""

from __future__ import annotations

from trimtab.observe.doctor.rule import DoctorRule
from trimtab.observe.doctor.rules import (
    causes,
    conversations,
    critic,
    learning,
    memory,
    objectives,
    policy,
    ranks,
    signal,
    speed,
)

RULES: tuple[DoctorRule, ...] = (
    *learning.RULES,
    *signal.RULES,
    *conversations.RULES,
    *policy.RULES,
    *critic.RULES,
    *objectives.RULES,
    *speed.RULES,
    *causes.RULES,
    *ranks.RULES,
    *memory.RULES,
)
