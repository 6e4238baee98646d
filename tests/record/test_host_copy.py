"""Copies on the host are equal, lie in memory that is used again, and values that are not finite are noticed on the way."""

from __future__ import annotations

import math

import pytest
import torch

from trimtab.record import host_copy
from trimtab.record.host_copy import HostCopy, is_finite, may_be_not_finite, size_of

CPU = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(300_000),
        "turned": torch.randn(6, 4).T,
        "holes": torch.randn(6, 4)[:, ::2],
        "half": torch.randn(9).bfloat16(),
        "codes": torch.randint(0, 255, (300,), dtype=torch.uint8),
        "double": torch.randn(3, dtype=torch.float64),
        "number": torch.tensor(2.0),
        "none": torch.zeros(0),
    }


def test_copies_are_equal_and_apart() -> None:
    found, memory = tensors(), HostCopy(CPU)
    assert memory.reserve(size_of(found))
    copies = memory.take(list(found.values()))
    assert not any(may_be_not_finite(list(found.values())))
    for copy, (name, tensor) in zip(copies, found.items()):
        expected = tensor.clone()
        assert copy.dtype == tensor.dtype and torch.equal(copy, expected), name
        tensor.zero_()
        assert torch.equal(copy, expected), f"{name} is not a copy"


def test_memory_is_taken_once() -> None:
    memory = HostCopy(CPU)
    assert memory.reserve(4096)
    before = memory.take([torch.ones(4)])[0].data_ptr()
    assert memory.reserve(1024) and memory.take([torch.ones(2)])[0].data_ptr() == before


def test_nothing_is_taken_where_the_host_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "host_memory", lambda: (10**9, 10**6))
    assert HostCopy(CPU).reserve(10**5)
    assert not HostCopy(CPU).reserve(10**6), "nothing would be left for anybody else"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["large", "turned", "holes", "half", "double", "number"])
def test_a_value_that_is_not_finite_is_noticed(name: str, value: float) -> None:
    found = tensors()
    found[name][(-1,) * found[name].ndim] = value
    suspects = may_be_not_finite(list(found.values()))
    assert dict(zip(found, suspects)) == {other: other == name for other in found}
    assert not is_finite(found[name])


def test_large_values_whose_sum_overflows_are_finite() -> None:
    large = torch.full((8,), 3e38)
    assert may_be_not_finite([large]) == [True] and is_finite(large)
