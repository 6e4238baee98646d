"""Which sequences enter SGLang, and when.

The samples of a prompt enter together, as far as there is room, but for the first, which is one step ahead: the others then
find the prompt's KV in the cache. Asked for all at once SGLang would compute it for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

from trimtab.rollout.external.messages import Ask


class Admission:
    """Every sequence enters once, in the order of prompts."""

    def __init__(self, room: int, share: bool) -> None:
        self._room, self._share = room, share
        self._prompts: deque[list[Ask]] = deque()
        self._behind: list[tuple[Ask, list[Ask]]] = []
        """First samples that have entered, and those that wait for them."""

    def __bool__(self) -> bool:
        return bool(self._prompts or self._behind)

    def add(self, asks: Sequence[Ask]) -> None:
        self._prompts += [list(samples) for _, samples in groupby(asks, key=lambda ask: ask.tokens)]

    def enter(self, running: int, has_begun: Callable[[Ask], bool]) -> list[Ask]:
        """Those whose turn it is, beside so many that run. `has_begun`: a token of it was drawn, or it has ended."""
        entering = [ask for first, others in self._behind if has_begun(first) for ask in others]
        self._behind = [(first, others) for first, others in self._behind if not has_begun(first)]
        taken = running + len(entering) + sum(len(others) for _, others in self._behind)
        while self._prompts and taken < self._room:
            first, *others = self._prompts.popleft()
            taken += 1 + len(others)
            entering.append(first)
            if self._share and others:
                self._behind.append((first, others))
            else:
                entering += others
        return entering

    def clear(self) -> None:
        self._prompts.clear()
        self._behind.clear()
