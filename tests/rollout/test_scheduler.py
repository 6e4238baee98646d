"""The scheduler finishes every sample exactly once with any pool that holds one sequence, and loses no page."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.native.scheduler import PromptGroup, Scheduler, Sequence

GROUPS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=8)


def drive(
    groups: list[tuple[int, int, int]],
    rows: int,
    pages: int,
    page_tokens: int,
    prefill_tokens: int,
    most_steps: int = 1,
):
    """Run the scheduler as the engine does, with sequences that end at their limit. Returns (finished, preempted, pool)."""
    pool = PagePool(pages, page_tokens)
    made: dict[tuple[int, int], int] = {}

    def save(sequence: Sequence) -> None:
        sequence.tokens = [0] * made[sequence.group.index, sequence.sample]

    work = Scheduler(pool, rows, prefill_tokens, save)
    for index, (prompt, samples, limit) in enumerate(groups):
        work.add(PromptGroup(index, list(range(index, index + prompt)), [limit] * samples))
    finished: Counter[tuple[int, int]] = Counter()
    preempted = 0
    for _ in range(100_000):
        if not work.unfinished:
            break
        chosen = work.next_fill()
        assert sum(n for _, n in chosen) <= prefill_tokens
        for filling, count in chosen:
            work.filled(filling, count)
        forks = work.fork()
        copies = [fork.copy for fork in forks if fork.copy]
        assert not {source for source, _ in copies} & {target for _, target in copies}, "copying could not be repeated"
        for fork in forks:
            made[fork.sequence.group.index, fork.sequence.sample] = 1
        for sequence in [s for s in work.running if made[s.group.index, s.sample] >= s.limit]:
            finished[sequence.group.index, sequence.sample] += 1
            work.finish([sequence])
        live = work.live()
        if not live:
            continue
        steps = work.steps_ahead(live, most_steps)
        gone = work.make_room(live, max(1, steps))
        assert not (gone and steps), "preempted although there were pages"
        preempted += len(gone)
        assert len(work.running) <= rows
        assert len({s.row for s in work.running}) == len(work.running)
        for sequence in list(work.running):
            key = (sequence.group.index, sequence.sample)
            assert sequence.stored == len(sequence.group.prompt) + made[key] - 1
            grown = min(max(1, steps), sequence.limit - made[key])
            assert sequence.stored + grown <= len(sequence.pages) * page_tokens, "no page for the next tokens"
            sequence.stored += grown
            made[key] += grown
            if made[key] >= sequence.limit:
                finished[key] += 1
                work.finish([sequence])
    assert not work.unfinished, "the scheduler stands still"
    return finished, preempted, pool


@settings(max_examples=400, deadline=None)
@given(GROUPS, st.integers(1, 6), st.integers(0, 12), st.integers(1, 5), st.integers(1, 8), st.sampled_from([1, 4, 16]))
def test_every_sample_finishes_once_and_no_page_is_lost(
    groups, rows, spare, page_tokens, prefill_tokens, steps
) -> None:
    smallest = max(-(-(prompt + limit) // page_tokens) for prompt, _, limit in groups) + 1
    finished, _, pool = drive(groups, rows, smallest + spare, page_tokens, prefill_tokens, steps)
    expected = {(i, s): 1 for i, (_, samples, _) in enumerate(groups) for s in range(samples)}
    assert finished == expected
    assert pool.held == 0


def test_a_roomy_pool_never_parks() -> None:
    groups = [(5, 4, 20)] * 6
    _, preempted, _ = drive(groups, rows=24, pages=24 * 7 + 12, page_tokens=4, prefill_tokens=64)
    assert preempted == 0


def test_a_tight_pool_parks_and_still_finishes() -> None:
    finished, preempted, _ = drive([(4, 4, 12)] * 3, rows=8, pages=8, page_tokens=4, prefill_tokens=64)
    assert preempted > 0
    assert sum(finished.values()) == 12


def test_prompts_that_end_with_a_page_leave_room_to_grow_too() -> None:
    """Their samples take no page when they are forked, but one each for the next token."""
    pool = PagePool(16, 4)
    work = Scheduler(pool, rows=32, prefill_tokens=64)
    for index in range(4):
        work.add(PromptGroup(index, list(range(index, index + 8)), [4] * 8))
    for filling, count in work.next_fill():
        work.filled(filling, count)
    work.fork()
    assert 1 < len(work.running) <= pool.available
    assert not work.make_room(work.live())


def test_ten_thousand_random_operations_leak_nothing() -> None:
    """Many groups through one small pool: decode steps, preemptions and resumes add up to well over 10,000 operations."""
    groups = [(1 + i % 7, 1 + i % 4, 1 + (i * 7) % 23) for i in range(300)]
    finished, _, pool = drive(groups, rows=8, pages=20, page_tokens=3, prefill_tokens=16)
    assert sum(finished.values()) == sum(samples for _, samples, _ in groups)
    assert pool.held == 0
