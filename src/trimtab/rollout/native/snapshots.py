"""Slots of prompts, and what free ones still hold: what layers carried at the end of cached pages. Pure bookkeeping.

Pages say what attention has stored of a prefix; to go on from there, what layers carried at its end is needed too. A snapshot of
that is taken where a prefix is met for the second time, so that prompts which share nothing cost nothing: those of one system
prompt, and the turns of a conversation, share it from then on. Snapshots lie in slots that no prompt needs, and give way to them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Prefix = tuple[int, ...]


class Snapshots:
    """Every slot belongs to a prompt, holds a snapshot, or is free."""

    def __init__(self, slots: Iterable[int], page_tokens: int) -> None:
        self._all, self._page_tokens = sorted(slots, reverse=True), page_tokens
        self._kept: OrderedDict[Prefix, int] = OrderedDict()
        """Least recently used first."""
        self._busy: set[int] = set()
        """Slots that are going to be copied from or to."""
        self.begin()

    def begin(self) -> None:
        """No prompt has a slot."""
        held = set(self._kept.values())
        self._free = [slot for slot in self._all if slot not in held]
        self._busy.clear()

    def forget_all(self) -> None:
        """What is held was computed by an older policy, or is not there any more."""
        self._free += self._kept.values()
        self._kept.clear()

    @property
    def available(self) -> bool:
        """`take` would find a slot."""
        return bool(self._free) or any(slot not in self._busy for slot in self._kept.values())

    def take(self) -> int:
        """A slot for a prompt; the snapshot that was used least recently gives way."""
        if not self._free:
            oldest = next(prefix for prefix, slot in self._kept.items() if slot not in self._busy)
            self._free.append(self._kept.pop(oldest))
        return self._free.pop()

    def give(self, slot: int) -> None:
        """A prompt needs its slot no more."""
        self._free.append(slot)

    def keep(self, prefix: Sequence[int]) -> int | None:
        """A slot for the snapshot at the end of a prefix, to be written now; None where there is none for it."""
        key = tuple(prefix)
        if key in self._kept or not self.available:
            return None
        self._kept[key] = slot = self.take()
        self._busy.add(slot)
        return slot

    def find(self, tokens: Sequence[int], pages: int, takes_one: bool = False) -> tuple[int, int]:
        """The longest prefix of at most so many whole pages that has a snapshot: its pages, and the slot. 0 and -1: none has.
        `takes_one`: a slot is taken next, which may not be the one that was found; where it is the last one left, none is."""
        for count in range(pages, 0, -1) if self._kept else ():
            key = tuple(tokens[: count * self._page_tokens])
            if key in self._kept:
                others = (slot for slot in self._kept.values() if slot not in self._busy and slot != self._kept[key])
                if takes_one and not self._free and next(others, None) is None:
                    return 0, -1
                self._kept.move_to_end(key)
                self._busy.add(self._kept[key])
                return count, self._kept[key]
        return 0, -1

    def copied(self) -> None:
        """What `find` and `keep` named has been copied."""
        self._busy.clear()
