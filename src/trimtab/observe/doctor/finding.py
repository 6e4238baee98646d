"""What the doctor says: a finding carries its unit, what is healthy, what was seen, the likely cause and a remedy.

A remedy is "safe" where it cannot change what is learned (a `run` or `observe` key, the machine), and "advice" where it can
(`learn`, data, rewards): the first kind may be applied by a tool, the second is the user's to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "warn", "bad"]
Kind = Literal["safe", "advice"]
LEVELS: tuple[Level, ...] = ("ok", "warn", "bad")


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    rule: str
    level: Level
    title: str
    unit: str
    healthy: str
    """The healthy range, in words."""
    evidence: str
    """What was seen, with numbers, and where."""
    cause: str
    remedy: str
    kind: Kind

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Sequence[Finding]) -> Level:
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def is_healthy(findings: Sequence[Finding], strict: bool) -> bool:
    """What the exit code tells: nothing bad, and with `strict` no warning either."""
    return worst(findings) == "ok" or (worst(findings) == "warn" and not strict)
