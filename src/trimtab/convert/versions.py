"""Which version of a framework is meant: its defaults have changed from one to the next.

Guarantees that the defaults taken are those of the version that is asked for, or of the newest that is known; a version that is
not known is refused, not taken for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.base.errors import ConfigError, Problem


class Absent:
    """The value of a default that a version does not have."""


ABSENT = Absent()


@dataclass(frozen=True)
class OldDefault:
    """A default that had another value before a version. Of several for one name, the earliest of the later versions counts."""

    before: str
    name: str
    value: Any


def number(version: str) -> tuple[int, ...]:
    """0.24 as (0, 24, 0): to be compared."""
    parts = [int(part) for part in re.findall(r"\d+", version)[:3]]
    return tuple(parts + [0] * (3 - len(parts)))


def earlier(version: str, than: str) -> bool:
    return number(version) < number(than)


def chosen(kind: str, asked: str | None, oldest: str, newest: str) -> str:
    """The version to take: the one asked for, or the newest; empty where a kind of settings has no versions."""
    if asked is None:
        return newest
    if not newest:
        fix = "Leave --version out"
        raise ConfigError([Problem("--version", f"the settings of {kind} have no versions", fix)])
    version = asked.strip().removeprefix("v")
    if not re.fullmatch(r"\d+(\.\d+){1,2}(\.?(post|rc|dev)\d*)?", version):
        raise ConfigError([Problem("--version", f"{asked!r} is not a version", f"Write one such as {newest}")])
    if earlier(version, oldest) or earlier(newest, version):
        what = f"Trimtab knows the defaults of {kind} from {oldest} to {newest}, but not of {version}"
        fix = f"Write the nearest of these, and add flags for what differs in {version}"
        raise ConfigError([Problem("--version", what, fix)])
    return version


def defaults_of(version: str, today: Mapping[str, Any], was: Sequence[OldDefault]) -> dict[str, Any]:
    """The defaults of a version, by today's names."""
    found = dict(today)
    for change in sorted(was, key=lambda change: number(change.before), reverse=True):
        if version and earlier(version, change.before):
            found[change.name] = change.value
    return {name: value for name, value in found.items() if value is not ABSENT}
