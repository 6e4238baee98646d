"""The tail of a rollout by a library's engine, from outside: when few of the sequences that it was given are unfinished.

A process starts what it was given as soon as it has a free slot. So once fewer are left than there are slots, all of them run.
"""

from __future__ import annotations

from trimtab.rollout.engine import TAIL_SHARE


class TailClock:
    """One for each `generate`; times are those of one clock, in seconds."""

    def __init__(self, slots: int) -> None:
        self._slots, self._most = slots, 0
        self._since: float | None = None
        self.seconds = 0.0

    def see(self, left: int, now: float) -> None:
        """So many sequences are unfinished from now on."""
        self.pause(now)
        self._most = max(self._most, left)
        if 0 < left < TAIL_SHARE * min(self._slots, self._most):
            self._since = now

    def pause(self, now: float) -> None:
        """What follows is the caller's time, until something is seen again."""
        if self._since is not None:
            self.seconds += now - self._since
        self._since = None
