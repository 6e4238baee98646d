"""Samples that an engine of a fleet was given and has not handed to a process: another engine may still draw them.

They go to processes in the order in which they came, and back to the fleet from the end: what is left of a request is always its
first samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from trimtab.rollout.external.messages import Ask
from trimtab.rollout.feed import CutRequest


class Backlog:
    """What waits, by number of its request."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Ask]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, index: int, asks: Sequence[Ask]) -> None:
        self._waiting.extend((index, ask) for ask in asks)

    def next_of_one_request(self, most: int) -> list[Ask]:
        """The next, of one request, and at most so many."""
        first = self._waiting[0][0] if self._waiting else None
        found: list[Ask] = []
        while self._waiting and len(found) < most and self._waiting[0][0] == first:
            found.append(self._waiting.popleft()[1])
        return found

    def hand_back(self, samples: int) -> list[CutRequest]:
        """Forget up to so many, the last ones."""
        taken: dict[int, int] = {}
        while self._waiting and sum(taken.values()) < samples:
            index, _ = self._waiting.pop()
            taken[index] = taken.get(index, 0) + 1
        return [CutRequest(index, count) for index, count in taken.items()]
