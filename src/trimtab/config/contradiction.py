"""The words of config/check.py: what a contradiction is, and when a key counts as set."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.config.base import Section
from trimtab.config.schema import RewardPart

REWARD_MODEL = "model:"


@dataclass(frozen=True)
class Contradiction:
    """A problem and the keys that it follows from; the first is where it is reported."""

    keys: tuple[str, ...]
    what: str
    fix: str

    def concerns(self, key: str) -> bool:
        return any(mine == key or mine.startswith(f"{key}.") or key.startswith(f"{mine}.") for mine in self.keys)


def clash(keys: str, what: str, fix: str) -> Contradiction:
    return Contradiction(tuple(keys.split()), what, fix)


def changed(section: Section, *names: str) -> list[str]:
    """Those of the named keys, or of all keys, whose value is not the default of the section's class."""
    fields = type(section).model_fields
    return [name for name in names or fields if getattr(section, name) != fields[name].default]


def reward_name(part: RewardPart) -> str:
    """What a reward part is called in metrics and in eval.part."""
    return part.name or ("reward_model" if part.fn.startswith(REWARD_MODEL) else part.fn.rsplit(":", 1)[-1])
