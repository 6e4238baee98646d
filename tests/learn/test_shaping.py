from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from trimtab.learn.shaping import overlong_penalty, reward_clip


def test_reward_clip():
    assert reward_clip(torch.tensor([-3.0, 0.25, 7.0]), -1.0, 2.0).tolist() == [-1.0, 0.25, 2.0]
    with pytest.raises(AssertionError, match="empty range"):
        reward_clip(torch.tensor([0.0]), 1.0, -1.0)


def test_overlong_penalty_by_hand():
    # max 100, buffer 20: nothing up to 80; 85 is 5/20 of the way, 90 is 10/20, 100 all of it; the penalty is 2.
    lengths = torch.tensor([1, 80, 81, 85, 90, 100, 120])
    expected = torch.tensor([0.0, 0.0, -0.1, -0.5, -1.0, -2.0, -2.0])
    assert_close(overlong_penalty(lengths, 100, 20, 2.0), expected)


def test_the_buffer_may_be_the_whole_length_but_not_more():
    assert_close(overlong_penalty(torch.tensor([0, 5, 10]), 10, 10, 1.0), torch.tensor([0.0, -0.5, -1.0]))
    with pytest.raises(AssertionError, match="does not fit"):
        overlong_penalty(torch.tensor([5]), 10, 11, 1.0)


@given(st.integers(1, 50), st.data(), st.floats(0.1, 5))
def test_the_penalty_never_shrinks_with_length(max_new_tokens: int, data: st.DataObject, penalty: float):
    buffer = data.draw(st.integers(1, max_new_tokens))
    penalties = overlong_penalty(torch.arange(max_new_tokens + 1), max_new_tokens, buffer, penalty)
    assert (penalties.diff() <= 0).all()
    assert penalties[max_new_tokens - buffer] == 0
    assert penalties[-1] == pytest.approx(-penalty)
