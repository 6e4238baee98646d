"""The engines of all ranks as one engine.

Requests are shared out by group. A token is a function of (seed, step, prompt, sample, position) and of the weights, so it does
not matter which engine draws it: on a CPU to the bit, on GPUs up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trimtab.cluster.messages import Done
from trimtab.cluster.ranks import Ranks
from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.trajectory import Group
from trimtab.update.shares import deal


class Fleet:
    """See rollout/engine.py."""

    def __init__(self, ranks: Ranks, description: str, lowered: Sequence[Mapping[str, int]]) -> None:
        self._ranks, self._description = ranks, description
        self._lowered = [dict(each) for each in lowered]
        self.stats = RolloutStats()

    @property
    def description(self) -> str:
        return f"{self._description}, on each of {len(self._ranks)} devices"

    @property
    def non_torch_bytes(self) -> int:
        """The ranks' meters count it."""
        return 0

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        self.stats = RolloutStats()
        costs = [float(len(r.prompt.tokens) + sum(r.limits)) for r in requests]
        dealt, _ = deal(costs, len(self._ranks))
        args = [([requests[i] for i in mine],) if mine else None for mine in dealt]
        found: list[RolloutStats] = []
        for rank, value in self._ranks.stream("generate", args):
            if isinstance(value, Done):
                continue
            if isinstance(value, RolloutStats):
                found.append(value)
            else:
                yield replace(value, index=dealt[rank][value.index])
        self.stats = side_by_side(found)

    def lend(self) -> None:
        self._ranks.ask("lend")

    def publish(self, version: int) -> None:
        self._ranks.ask("publish", version)

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        found = [sizes for sizes in self._ranks.ask("shrink", least_tokens) if sizes is not None]
        self._lowered = self._ranks.ask("lowered")
        return (max(before for before, _ in found), min(after for _, after in found)) if found else None

    @property
    def lowered(self) -> dict[str, int]:
        """The lowest of all ranks."""
        names = {name for each in self._lowered for name in each}
        return {name: min(each[name] for each in self._lowered if name in each) for name in sorted(names)}

    def lower(self, limits: Mapping[str, int], least_tokens: int) -> None:
        self._ranks.ask("lower", dict(limits), least_tokens)
        self._lowered = self._ranks.ask("lowered")

    def close(self) -> None:
        """Ranks end with the run."""


def side_by_side(found: Sequence[RolloutStats]) -> RolloutStats:
    """What engines did at the same time: counts add up, and so do slots and pages; seconds are the slowest one's."""
    whole = RolloutStats()
    for stats in found:
        whole.add(stats)
    for name in ("slots", "peak_pages", "total_pages"):
        setattr(whole, name, sum(getattr(stats, name) for stats in found))
    for name in ("prefill_s", "decode_s", "wait_s", "decode_steps"):
        setattr(whole, name, max((getattr(stats, name) for stats in found), default=0))
    return whole
