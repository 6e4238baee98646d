from __future__ import annotations

import torch

from trimtab.learn.segments import size_by, sum_by


def test_sum_by_adds_what_shares_an_index_and_leaves_zero_where_nothing_does():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    index = torch.tensor([2, 0, 2, 0])
    assert sum_by(values, index, 4).tolist() == [10.0, 0.0, 5.0, 0.0]
    assert size_by(index, 4).tolist() == [2, 0, 2, 0]


def test_sum_by_is_differentiable():
    values = torch.randn(5, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([1, 0, 1, 2, 0])
    assert torch.autograd.gradcheck(lambda v: sum_by(v, index, 3), (values,))


def test_nothing_sums_to_nothing():
    assert sum_by(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 2).tolist() == [0.0, 0.0]
