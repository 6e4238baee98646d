"""Every rule on a run: what was found, what was healthy, and what could not be judged and why. None is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.observe.doctor.finding import LEVELS, Finding
from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import DoctorRule
from trimtab.observe.doctor.rules import RULES

MIN_STEPS_TO_JUDGE = 5
"""Below this, nothing can be said of a run as a whole."""


@dataclass
class Examination:
    findings: list[Finding] = field(default_factory=list)
    """The worst first."""
    healthy: list[str] = field(default_factory=list)
    """Rules that judged and found nothing."""
    not_judged: dict[str, str] = field(default_factory=dict)
    """Rule to reason."""


def examine(record: Record, rules: Sequence[DoctorRule] = RULES) -> Examination:
    done = Examination()
    for rule in rules:
        if finding := rule.apply(record):
            done.findings.append(finding)
        elif why := rule.not_judged(record):
            done.not_judged[rule.id] = why
        else:
            done.healthy.append(rule.id)
    done.findings.sort(
        key=lambda finding: -LEVELS.index(finding.level)
    )  # stable: within a level the rules' order stays
    return done
