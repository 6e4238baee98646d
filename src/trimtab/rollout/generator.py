"""The Generator of one device: an engine, and conversations with an environment on top of it where the run has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from trimtab.rollout.engine import Engine, Request, RolloutStats, Sampler
from trimtab.rollout.trajectory import Group

Repeat = Callable[[str, Callable[[], None]], None]
"""Does some work, whose name it is given; again, with less, where memory runs out."""


class LocalGenerator:
    """See run/roles.py. `sampler`: the engine, or the engine that talks with an environment."""

    apart = False

    def __init__(self, engine: Engine, sampler: Sampler, repeat: Repeat) -> None:
        self._engine, self._sampler, self._repeat = engine, sampler, repeat

    @property
    def stats(self) -> RolloutStats:
        return self._sampler.stats

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        return self._sampler.generate(requests)

    def lend(self) -> None:
        self._engine.lend()

    def publish(self, version: int) -> Mapping[str, float]:
        self._repeat("publish", lambda: self._engine.publish(version))
        return {}

    def close(self) -> None:
        self._engine.close()
