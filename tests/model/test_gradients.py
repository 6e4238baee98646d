"""Sums of gradients: where they are, whose they are, and when there are none."""

from __future__ import annotations

import pytest
import torch

from trimtab.model.gradients import Gradients, add_product
from trimtab.model.weights import WeightStore


def make(**shapes: tuple[int, ...]) -> tuple[WeightStore, list[torch.nn.Parameter]]:
    named = {
        name.replace("__", "."): torch.nn.Parameter(torch.randn(shape).bfloat16()) for name, shape in shapes.items()
    }
    return WeightStore(named.items()), list(named.values())


def test_joined_parameters_have_their_sums_in_one() -> None:
    weights, parameters = make(a__k_proj__weight=(64, 4), a__q_proj__weight=(128, 4), a__v_proj__weight=(2, 4))
    key, query, value = parameters
    gradients = Gradients(weights, parameters)
    total = gradients.of(query, key, value)
    assert total is not None and total.shape == (194, 4) and total.dtype == torch.float32
    total += torch.arange(776.0).view(194, 4)
    assert torch.equal(gradients.get(query), torch.arange(512.0).view(128, 4))
    assert torch.equal(gradients.get(key), torch.arange(512.0, 768.0).view(64, 4))
    assert torch.equal(gradients.get(value), torch.arange(768.0, 776.0).view(2, 4))


def test_nothing_exists_before_the_first_gradient_and_after_clear() -> None:
    weights, parameters = make(a=(2, 2), b=(2, 2))
    gradients = Gradients(weights, parameters)
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


def test_a_parameter_without_a_gradient_has_none_though_its_unit_has_sums() -> None:
    weights, parameters = make(layers__0__a=(2, 3), layers__0__b=(2, 3))
    gradients = Gradients(weights, parameters)
    gradients.of(parameters[0])
    assert gradients.get(parameters[0]) is not None and gradients.get(parameters[1]) is None


def test_joined_parameters_of_which_some_are_frozen_have_one_sum_to_add_to() -> None:
    weights, (query, key, value) = make(q_proj__weight=(64, 4), k_proj__weight=(64, 4), v_proj__weight=(64, 4))
    gradients = Gradients(weights, [value])
    total = gradients.of(query, key, value)
    assert total is not None and gradients.of(query) is None
    total += 1.0
    assert torch.equal(gradients.get(value), torch.ones(64, 4)) and gradients.get(query) is None


def test_parameters_that_were_moved_are_found() -> None:
    weights, parameters = make(a=(2, 3))
    gradients = Gradients(weights, parameters)
    total = gradients.of(parameters[0])
    assert total is not None
    total += 1.0
    parameters[0].data = parameters[0].data.clone()
    assert torch.equal(gradients.get(parameters[0]), torch.ones(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_products_are_not_lost_in_large_sums(dtype: torch.dtype) -> None:
    total = torch.full((2, 2), 4096.0)
    for _ in range(8):
        add_product(total, torch.ones(2, 1, dtype=dtype), torch.full((1, 2), 0.5, dtype=dtype))
    assert torch.equal(total, torch.full((2, 2), 4100.0))
