"""What observing a run costs, by its own clock."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType


class OwnCost:
    """The time inside of its blocks; one inside another counts once."""

    def __init__(self) -> None:
        self._spent = self._since = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            self._since = perf_counter()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._spent += perf_counter() - self._since

    def take_s(self) -> float:
        """Seconds since the last call."""
        spent, self._spent = self._spent, 0.0
        return spent
