"""The engine of a run that only trains: it holds nothing, gives nothing up and generates nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.trajectory import Group


class NoRollout:
    """See rollout/engine.py."""

    description = "none"
    non_torch_bytes = 0

    def __init__(self) -> None:
        self.stats = RolloutStats()

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        raise AssertionError("a run that only trains was asked to generate")

    def lend(self) -> None:
        pass

    def publish(self, version: int) -> None:
        pass

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        return None

    @property
    def lowered(self) -> dict[str, int]:
        return {}

    def lower(self, limits: Mapping[str, int], least_tokens: int) -> None:
        pass

    def close(self) -> None:
        pass
