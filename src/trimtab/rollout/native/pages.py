"""KV pages: who holds which, and what earlier prompts left that can be used again.

Invariant, checked by property tests: every page is either free, held by one or more owners, or cached with no owner; the three
counts add up to the pool at all times, and releasing every owner returns the pool to its starting level.

A cached page is found by the exact tokens that lead up to and include it (a chain of nodes, not a hash that could collide), and
lives until it is needed for something else or the policy version changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

ROOT = -1


class PagePool:
    """Fixed number of pages of `page_tokens` tokens each."""

    def __init__(self, pages: int, page_tokens: int, prefix_cache: bool = True) -> None:
        self.total = pages
        self.page_tokens = page_tokens
        self._prefix_cache = prefix_cache
        self._free = list(range(pages))
        """A heap: the lowest page goes out first, so that what is in use lies close together."""
        self._owners = [0] * pages
        self._page_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._node_of: dict[int, int] = {}
        """Cached page -> a number that is never used again, so that a page's next life is not mistaken for this one."""
        self._nodes = count()
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached pages without an owner, least recently used first."""
        self.peak_held = 0

    @property
    def available(self) -> int:
        """Pages that `take` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.total - self.available

    def take(self, number: int) -> list[int] | None:
        """`number` pages with one owner each, or None (and no change) if fewer are free."""
        if number > self.available:
            return None
        while len(self._free) < number:
            self._forget(self._idle.popitem(last=False)[0])
        taken = [heappop(self._free) for _ in range(number)]
        for page in taken:
            self._owners[page] = 1
        self.peak_held = max(self.peak_held, self.held)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to pages that are held already."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is shared but has no owner"
            self._owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take one owner off each page."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} released more often than taken"
            self._owners[page] -= 1
            if self._owners[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    heappush(self._free, page)

    def lower(self, page: int) -> int | None:
        """Exchange a page that has one owner for the lowest free one, where that lies lower; the caller moves what is in it."""
        if self._owners[page] != 1 or page in self._key_of or not self._free or self._free[0] > page:
            return None
        target = heapreplace(self._free, page)
        self._owners[page], self._owners[target] = 0, 1
        return target

    def remember(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Offer the full pages of a prefilled prompt to later prompts that begin with the same tokens."""
        if not self._prefix_cache:
            return
        parent = ROOT
        for index in range(len(tokens) // self.page_tokens):
            key = (parent, self._page_key(tokens, index))
            if key not in self._page_of:
                page = pages[index]
                assert page not in self._key_of, f"page {page} is cached under two prefixes"
                self._page_of[key], self._key_of[page], self._node_of[page] = page, key, next(self._nodes)
            parent = self._node_of[self._page_of[key]]

    def recall(self, tokens: Sequence[int]) -> list[int]:
        """The longest run of cached pages that these tokens begin with, with one owner added to each."""
        found: list[int] = []
        parent = ROOT
        for index in range(len(tokens) // self.page_tokens):
            page = self._page_of.get((parent, self._page_key(tokens, index)))
            if page is None:
                break
            found.append(page)
            parent = self._node_of[page]
        for page in found:
            self._idle.pop(page, None)
            self._owners[page] += 1
        self.peak_held = max(self.peak_held, self.held)
        return found

    def forget_all(self) -> None:
        """Drop the cache: what it holds was computed by an older policy."""
        self._page_of.clear()
        self._key_of.clear()
        self._node_of.clear()
        self._free.extend(self._idle)
        heapify(self._free)
        self._idle.clear()

    def _page_key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.page_tokens : (index + 1) * self.page_tokens])

    def _forget(self, page: int) -> None:
        """Drop a page from the cache. Pages that continue it can no longer be found, and leave as they age."""
        del self._page_of[self._key_of.pop(page)], self._node_of[page]
        heappush(self._free, page)
