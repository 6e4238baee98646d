"""Samples as they end, put together into the groups that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.rollout.engine import Request, whole_group
from trimtab.rollout.trajectory import Group, Trajectory


class Collector:
    """The requests of one `generate`. Every group comes out once, as soon as its last sample is there."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.requests: list[Request] = []
        self._found: dict[int, list[Trajectory]] = {}
        self._wanted: list[int] = []

    def add(self, request: Request) -> int:
        """The number that a request has from now on."""
        index = len(self.requests)
        self.requests.append(request)
        self._found[index] = []
        self._wanted.append(request.samples)
        return index

    def extend(self, requests: Sequence[Request]) -> list[int]:
        return [self.add(request) for request in requests]

    def put(self, index: int, trajectory: Trajectory) -> Group | None:
        """A sample has ended: its group, if it was the last."""
        self._found[index].append(trajectory)
        return self._if_whole(index)

    def cut(self, index: int, samples: int) -> Group | None:
        """The last `samples` of a request are drawn elsewhere: its group, if nothing else was missing."""
        self._wanted[index] -= samples
        return self._if_whole(index)

    def _if_whole(self, index: int) -> Group | None:
        if len(self._found[index]) < self._wanted[index]:
            return None
        found = self._found.pop(index)
        return whole_group(self.requests[index], found, index, self._tokenizer) if found else None
