"""Dealing a step to ranks: equal lengths divide evenly, few and unequal ones do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.test_planner import qwen
from trimtab.plan.balance import deal


def test_equal_sequences_are_dealt_evenly_where_their_number_divides() -> None:
    assert deal(qwen(), 8, 16384).imbalance == pytest.approx(1.0)
    assert deal(qwen(prompts=3, samples=1), 2, 16384).imbalance == pytest.approx(4 / 3)
    assert deal(qwen(prompts=1, samples=2), 8, 16384).imbalance == pytest.approx(4.0), "six ranks have nothing"


def test_one_long_sequence_is_what_all_wait_for() -> None:
    job = replace(qwen(prompts=8, samples=1, completion=4096), lengths=(64.0,) * 7 + (4096.0,))
    assert deal(job, 4, 8192).imbalance > 2


@given(
    st.integers(1, 200), st.integers(1, 8), st.integers(2, 16), st.integers(600, 40_000),
    st.lists(st.floats(1, 512), max_size=20),
)  # fmt: skip
def test_no_rank_has_less_than_the_mean_at_most(
    prompts: int, samples: int, ranks: int, budget: int, lengths: list[float]
) -> None:
    job = replace(qwen(prompts=prompts, samples=samples), lengths=tuple(sorted(lengths)))
    found = deal(job, ranks, budget)
    assert 0.999 <= found.imbalance <= ranks * 1.001 and found.micro_batches >= 1
