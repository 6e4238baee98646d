"""What the driver and a rank say to each other: pickles over the channel of workers/messages.py.

    driver -> rank    Order: a method of what the rank has built, with its arguments
    rank -> driver    Item...: what a method that yields has so far;  then Answer, Short or Raised.  Any time: Told, Heartbeat

A rank carries out one order at a time. Answers have the number of their order: one that the driver no longer waits for, because
it was interrupted, is not taken for the answer to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Order:
    """Call a method."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class Item:
    """One of the values that a method yields."""

    value: Any
    order: int = 0


@dataclass(frozen=True)
class Answer:
    """What a method returned."""

    value: Any = None
    order: int = 0


@dataclass(frozen=True)
class Short:
    """The rank ran out of memory; it has given nothing back yet."""

    message: str
    facts: Any = None
    """What the rank says of where it was."""
    order: int = 0
    parted: bool = False
    """It has left the group, so that no rank waits for it in a collective."""


@dataclass(frozen=True)
class Broken:
    """Another rank has failed, and this one was freed from a collective. It goes on once all ranks have met again."""

    order: int = 0


@dataclass(frozen=True)
class Raised:
    """An error that is meant for the user. The rank goes on."""

    error: Exception
    order: int = 0


@dataclass(frozen=True)
class RankFailed:
    """The last message of a rank that cannot go on."""

    text: str


@dataclass(frozen=True)
class Told:
    """Something for the user, or for whoever else listens: a kind and its text."""

    kind: str
    text: str


@dataclass(frozen=True)
class Heartbeat:
    """The rank is alive; `progress` changes as long as its work goes on. `work`: how far it is, for people (base/spans.py)."""

    progress: Any
    work: tuple[int, int | None, str] | None = None
