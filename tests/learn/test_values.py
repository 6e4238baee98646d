"""The critic's loss and what it explains, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.learn.values import explained_variance, value_loss


def test_the_loss_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 0.0], requires_grad=True)
    old, returns = torch.tensor([0.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, 0.5])
    plain = value_loss(values, old, returns, None)
    assert plain.loss.tolist() == [0.5, 0.5, 0.125] and not plain.clipped.any()
    # The first wants to go from 0 to 1 and may go to 0.2: (0.2 - 2)^2 / 2. The others are where they were.
    bound = value_loss(values, old, returns, 0.2)
    assert bound.loss.tolist() == pytest.approx([1.62, 0.5, 0.125]) and bound.clipped.tolist() == [True, False, False]
    bound.loss.sum().backward()
    assert values.grad.tolist() == [0.0, 1.0, -0.5]


def test_a_bound_holds_back_only_what_would_lower_the_loss() -> None:
    """A value that has run away from its return is pulled back, bound or not."""
    values = torch.tensor([-1.0], requires_grad=True)
    found = value_loss(values, torch.tensor([0.0]), torch.tensor([1.0]), 0.2)
    assert found.loss.tolist() == [2.0] and not found.clipped.any()


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=20),
    st.floats(0.01, 2),
)
def test_a_bound_never_lowers_the_loss(rows: list[tuple[float, float, float]], clip: float) -> None:
    values, old, returns = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows))
    assert (value_loss(values, old, returns, clip).loss >= value_loss(values, old, returns, None).loss).all()


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 7.0), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(4)))
    assert math.isnan(explained_variance(torch.zeros(1), torch.ones(1)))
