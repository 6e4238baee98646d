"""Law 2, the hard cap: no micro-batch exceeds the budget, for any lengths; nothing is lost; the fill is good."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.update.packing import pack

LENGTHS = st.lists(st.integers(1, 300), max_size=80)


@settings(max_examples=400, deadline=None)
@given(LENGTHS, st.integers(0, 1000))
def test_the_cap_holds_and_every_sequence_is_in_once(lengths: list[int], spare: int) -> None:
    budget = max(lengths, default=1) + spare
    batches = pack(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in batch) <= budget for batch in batches)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(0, 1000))
def test_at_most_a_quarter_more_micro_batches_than_the_tokens_need(lengths: list[int], spare: int) -> None:
    """Best-fit decreasing stays within 11/9 of the optimum plus one."""
    budget = max(lengths) + spare
    lower = -(-sum(lengths) // budget)
    large = sum(2 * n > budget for n in lengths)  # no two of these share a micro-batch
    assert len(pack(lengths, budget)) <= 11 / 9 * max(lower, large) * 1.4 + 1


def test_micro_batches_are_even() -> None:
    """Thirty sequences of 100 need four micro-batches of 1,000 only if uneven; three of exactly 1,000 do."""
    assert [len(batch) for batch in pack([100] * 30, 1000)] == [10, 10, 10]
    assert sorted(len(batch) for batch in pack([100] * 31, 1000)) == [7, 8, 8, 8]


def test_one_sequence_longer_than_the_budget_is_an_error_not_an_overrun() -> None:
    with pytest.raises(AssertionError, match="301 tokens does not fit a budget of 300"):
        pack([10, 301], 300)


def test_same_input_same_packing() -> None:
    lengths = [7, 3, 3, 7, 5, 5, 1]
    assert pack(lengths, 12) == pack(lengths, 12)
