"""What a scheduler hands back is not drawn here, what has started is, and every page returns."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from trimtab.rollout.native.handing_back import hand_back, load_of
from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.native.scheduler import PromptGroup, Scheduler

groups = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=6)


@given(groups, st.integers(1, 6), st.integers(8, 40), st.integers(0, 2**16))
def test_every_sample_is_drawn_here_or_handed_back(
    asked: list[tuple[int, int]], rows: int, pages: int, seed: int
) -> None:
    numbers, pool = Random(seed), PagePool(pages, 2, prefix_cache=bool(seed % 2))
    work = Scheduler(pool, rows, prefill_tokens=5)
    for index, (length, samples) in enumerate(asked):
        work.add(PromptGroup(index, [index * 20 + i for i in range(length)], [3] * samples))
    drawn, gone = [0] * len(asked), [0] * len(asked)
    for _ in range(500):
        if not work.unfinished:
            break
        for filling, count in work.next_fill():
            work.filled(filling, count)
        work.fork()
        if numbers.random() < 0.3:
            before, wanted = load_of(work), numbers.randint(1, 5)
            cuts = hand_back(work, wanted)
            for cut in cuts:
                gone[cut.index] += cut.samples
            taken = sum(cut.samples for cut in cuts)
            assert taken == min(wanted, before.unstarted)
            assert load_of(work).unstarted == before.unstarted - taken
        live = work.live()
        if live:
            work.make_room(live)
            for sequence in live:
                sequence.stored += sequence.row >= 0
        ended = [s for s in work.running if s.stored >= s.most_stored]
        for sequence in ended:
            drawn[sequence.group.index] += 1
        work.finish(ended)
    assert [a + b for a, b in zip(drawn, gone)] == [samples for _, samples in asked]
    assert pool.held == 0
