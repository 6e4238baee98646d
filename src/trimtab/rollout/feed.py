"""Requests that come while an engine already generates: where it is one of several, and the requests wait with the driver.

An engine asks its feed once a round. It says what it holds, and is told what to add and how much of what it has not started to
give back for another engine. Which engine draws a sample, and when, changes no token (rollout/engine.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trimtab.rollout.engine import Engine, Request
from trimtab.rollout.trajectory import Group


@dataclass(frozen=True)
class Bounds:
    """What all requests of a call stay within: an engine is laid out for it before it has seen them."""

    samples: int
    """Of all requests together."""
    new_tokens: int
    """Most of one sample."""
    tokens: int
    """Most of one sample, its prompt included."""

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Bounds:
        return cls(
            sum(request.samples for request in requests),
            max(max(request.limits) for request in requests),
            max(len(request.prompt.tokens) + max(request.limits) for request in requests),
        )


@dataclass(frozen=True)
class Load:
    """What an engine has to do."""

    unstarted: int
    """Samples that it has been given and not begun."""
    running: int
    free: int
    """Samples that it could begin now, those among them."""

    @property
    def idle(self) -> bool:
        return not self.unstarted and not self.running


@dataclass(frozen=True)
class CutRequest:
    """The last `samples` of a request, which are drawn elsewhere."""

    index: int
    """Of the request, in the order they came to this engine."""
    samples: int


@dataclass(frozen=True)
class News:
    """What an engine is told in a round."""

    requests: list[Request] = field(default_factory=list)
    """To be drawn too. Their groups are numbered on."""
    give_back: int = 0
    """Samples to give back of those that have not been started; fewer where there are fewer."""
    last: bool = False
    """Nobody waits for anything any more."""


class Feed(Protocol):
    """Where an engine's further requests come from."""

    bounds: Bounds

    def exchange(self, load: Load) -> News:
        """What is new. Waits for it where the engine is idle."""
        ...

    def returned(self, cuts: Sequence[CutRequest], load: Load) -> None:
        """The answer to each `give_back`: what is not going to be drawn here."""
        ...


class FedEngine(Engine, Protocol):
    """An engine that can be one of several."""

    def generate(self, requests: Sequence[Request], feed: Feed | None = None) -> Iterator[Group]:
        """As always; with a feed, also what comes from there, until it has ended. A group of which samples were given back is
        yielded with those that were drawn here, if there are any."""
        ...
