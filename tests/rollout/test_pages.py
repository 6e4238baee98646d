"""Pages: never lost, never given twice, and a cached prefix is only ever found by its own tokens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trimtab.rollout.native.pages import PagePool

PAGES, PAGE_TOKENS = 12, 2


class PageMachine(RuleBasedStateMachine):
    """Random takes, shares, releases, remembers, recalls and version changes against a simple model of ownership."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, PAGE_TOKENS)
        self.owners: list[tuple[list[int], list[int]]] = []
        """(tokens written to the pages, pages) of each owner."""
        self.content: dict[int, tuple[int, ...]] = {}
        """What was last written into a page: the whole prefix that leads up to it."""

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def fill_a_prompt(self, tokens: list[int]) -> None:
        cached = self.pool.recall(tokens)
        for index, page in enumerate(cached):
            assert self.content[page] == tuple(tokens[: (index + 1) * PAGE_TOKENS])
        fresh = self.pool.take(-(-len(tokens) // PAGE_TOKENS) - len(cached))
        if fresh is None:
            self.pool.release(cached)
            return
        pages = cached + fresh
        for index in range(len(cached), len(pages)):
            self.content[pages[index]] = tuple(tokens[: (index + 1) * PAGE_TOKENS])
        self.pool.remember(tokens, pages)
        self.owners.append((tokens, pages))

    @rule(count=st.integers(0, PAGES + 1))
    def take_more_than_there_is_changes_nothing(self, count: int) -> None:
        before = self.pool.available
        taken = self.pool.take(count)
        assert (taken is None) == (count > before)
        if taken is not None:
            assert len(set(taken)) == count
            held = {page for _, pages in self.owners for page in pages}
            assert not held & set(taken)
            for page in taken:
                self.content.pop(page, None)
            self.owners.append(([], taken))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            tokens, pages = data.draw(st.sampled_from(self.owners))
            self.pool.share(pages)
            self.owners.append((tokens, list(pages)))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            index = data.draw(st.integers(0, len(self.owners) - 1))
            self.pool.release(self.owners.pop(index)[1])

    @rule()
    def new_policy_version(self) -> None:
        self.pool.forget_all()
        self.content = dict.fromkeys(self.content, (-1,))  # nothing that was written before may be found again

    @invariant()
    def counts_add_up(self) -> None:
        held = {page for _, pages in self.owners for page in pages}
        assert self.pool.held == len(held)
        assert self.pool.available == PAGES - len(held)

    def teardown(self) -> None:
        for _, pages in self.owners:
            self.pool.release(pages)
        assert self.pool.held == 0


TestPages = PageMachine.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_cached_prefix_is_found_and_shared() -> None:
    pool = PagePool(8, 2)
    first = pool.take(2)
    assert first is not None
    pool.remember([1, 2, 3, 4], first)
    assert pool.recall([1, 2, 9, 9]) == first[:1]
    assert pool.recall([1, 2, 3, 4, 5]) == first
    assert pool.recall([3, 4]) == []


def test_without_a_prefix_cache_nothing_is_remembered() -> None:
    pool = PagePool(8, 2, prefix_cache=False)
    pages = pool.take(2)
    assert pages is not None
    pool.remember([1, 2, 3, 4], pages)
    assert pool.recall([1, 2, 3, 4]) == []


def test_cached_pages_give_way_to_new_ones_oldest_first() -> None:
    pool = PagePool(3, 1)
    for token in (7, 8):
        pages = pool.take(1)
        assert pages is not None
        pool.remember([token], pages)
        pool.release(pages)
    assert pool.available == 3
    taken = pool.take(2)
    assert taken is not None
    assert pool.recall([7]) == []  # the older one was given away
    assert len(pool.recall([8])) == 1
