"""The rules of `trimtab doctor RUN`, in the order in which they are told: what is learned first, then how fast."""

from __future__ import annotations

from trimtab.observe.doctor.rule import DoctorRule
from trimtab.observe.doctor.rules import conversations, critic, learning, memory, objectives, policy, signal, speed

RULES: tuple[DoctorRule, ...] = (
    *learning.RULES,
    *signal.RULES,
    *conversations.RULES,
    *policy.RULES,
    *critic.RULES,
    *objectives.RULES,
    *speed.RULES,
    *memory.RULES,
)
