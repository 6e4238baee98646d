from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from trimtab.config.learn import AggregateName
from trimtab.learn.aggregate import token_weights

MODES = get_args(AggregateName)
LENGTHS = torch.tensor([2, 3, 5])
LOSSES = [[1.0, 3.0], [1.0, 1.0, 4.0], [5.0, 0.0, 0.0, 0.0, 5.0]]


def total(weights: torch.Tensor, losses: list[list[float]]) -> float:
    return sum(weight * sum(tokens) for weight, tokens in zip(weights.tolist(), losses))


def test_token_mean_by_hand():
    weights = token_weights(LENGTHS, "token_mean", 8)
    assert_close(weights, torch.full((3,), 1 / 10))
    # (4 + 6 + 10) / 10
    assert total(weights, LOSSES) == pytest.approx(2.0)


def test_sequence_mean_by_hand():
    weights = token_weights(LENGTHS, "sequence_mean", 8)
    assert_close(weights, torch.tensor([1 / 6, 1 / 9, 1 / 15]))
    # sequence means 2, 2, 2
    assert total(weights, LOSSES) == pytest.approx(2.0)
    # sequence means 9, 0, 0
    assert total(weights, [[9.0, 9.0], [0.0], [0.0]]) == pytest.approx(3.0)


def test_sequence_sum_by_hand():
    weights = token_weights(LENGTHS, "sequence_sum", 8)
    assert_close(weights, torch.full((3,), 1 / 3))
    # sums 4, 6, 10
    assert total(weights, LOSSES) == pytest.approx(20 / 3)


def test_constant_by_hand():
    weights = token_weights(LENGTHS, "constant", 8)
    assert_close(weights, torch.full((3,), 1 / 24))
    assert total(weights, LOSSES) == pytest.approx(20 / 24)


@pytest.mark.parametrize("mode", MODES)
def test_an_excluded_sequence_is_as_if_it_were_not_there(mode: AggregateName):
    weights = token_weights(LENGTHS, mode, 8, torch.tensor([True, False, True]))
    assert weights[1] == 0
    assert_close(weights[[0, 2]], token_weights(LENGTHS[[0, 2]], mode, 8))


@pytest.mark.parametrize("mode", MODES)
def test_all_excluded_is_all_zero(mode: AggregateName):
    assert token_weights(LENGTHS, mode, 8, torch.zeros(3, dtype=torch.bool)).tolist() == [0.0, 0.0, 0.0]
    assert token_weights(torch.zeros(0, dtype=torch.int64), mode, 8).tolist() == []
    assert torch.isfinite(token_weights(torch.tensor([0, 0]), mode, 8)).all()


def test_weights_are_float32_with_and_without_exclusion():
    for include in (None, torch.tensor([True, True, False])):
        assert token_weights(LENGTHS, "sequence_mean", 8, include).dtype == torch.float32


def test_an_unknown_mode_is_refused():
    with pytest.raises(AssertionError, match="median"):
        token_weights(LENGTHS, "median", 8)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(0, 3)), min_size=1, max_size=16),
    st.sampled_from(MODES),
    st.integers(0, 2**31),
)
def test_any_split_into_micro_batches_sums_to_the_whole(
    sequences: list[tuple[int, bool, int]], mode: AggregateName, seed: int
):
    lengths = torch.tensor([length for length, _, _ in sequences])
    include = torch.tensor([kept for _, kept, _ in sequences])
    part_of = torch.tensor([part for _, _, part in sequences])
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.rand(int(n), generator=generator, dtype=torch.float64) for n in lengths]

    # The step's loss as each paper writes it, from the sequences that are left.
    kept = [loss for loss, keep in zip(losses, include) if keep]
    expected = 0.0
    if kept and mode == "token_mean":
        expected = float(torch.cat(kept).mean())
    elif kept and mode == "sequence_mean":
        expected = sum(float(loss.mean()) for loss in kept) / len(kept)
    elif kept and mode == "sequence_sum":
        expected = sum(float(loss.sum()) for loss in kept) / len(kept)
    elif kept:
        expected = sum(float(loss.sum()) / 20 for loss in kept) / len(kept)

    weights = token_weights(lengths, mode, 20, include)
    by_part = [
        sum(float(weights[i]) * float(losses[i].sum()) for i in range(len(losses)) if part_of[i] == part)
        for part in range(4)
    ]
    assert sum(by_part) == pytest.approx(expected, rel=1e-6)
