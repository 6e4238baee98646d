"""Sums of gradients: where they are, whose they are, and when there are none."""

from __future__ import annotations

import pytest
import torch

from trimtab.model.gradients import Gradients, add_product
from trimtab.model.parts import join


def make(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in shapes]


def test_parameters_in_one_storage_have_their_sums_in_one() -> None:
    parameters = make((3, 4), (2, 4))
    whole = join(parameters)
    gradients = Gradients(parameters)
    total = gradients.of(whole)
    assert total is not None and total.shape == (5, 4) and total.dtype == torch.float32
    total += torch.arange(20.0).view(5, 4)
    assert torch.equal(gradients.get(parameters[0]), torch.arange(12.0).view(3, 4))
    assert torch.equal(gradients.get(parameters[1]), torch.arange(12.0, 20.0).view(2, 4))


def test_nothing_exists_before_the_first_gradient_and_after_clear() -> None:
    parameters = make((2, 2), (2, 2))
    gradients = Gradients(parameters)
    assert gradients.of(torch.zeros(2)) is None
    assert gradients.get(parameters[0]) is None and gradients.get(parameters[1]) is None
    parameters[0].grad = torch.ones(2, 2).bfloat16()
    gradients.add(parameters[0])
    assert parameters[0].grad is None and torch.equal(gradients.get(parameters[0]), torch.ones(2, 2))
    assert gradients.get(parameters[1]) is None
    gradients.clear()
    assert gradients.get(parameters[0]) is None
    total = gradients.of(parameters[0])
    assert total is not None and not total.any()


def test_parameters_that_were_moved_between_steps_are_found() -> None:
    parameters = make((2, 3))
    gradients = Gradients(parameters)
    gradients.of(parameters[0])
    gradients.clear()
    parameters[0].data = parameters[0].data.clone()
    total = gradients.of(parameters[0])
    assert total is not None
    total += 1.0
    assert torch.equal(gradients.get(parameters[0]), torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_products_are_not_lost_in_large_sums(dtype: torch.dtype) -> None:
    total = torch.full((2, 2), 4096.0)
    for _ in range(8):
        add_product(total, torch.ones(2, 1, dtype=dtype), torch.full((1, 2), 0.5, dtype=dtype))
    assert torch.equal(total, torch.full((2, 2), 4100.0))
