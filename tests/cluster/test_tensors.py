"""Tensors travel as they are, whatever their type, shape and layout."""

from __future__ import annotations

import socket

import pytest
import torch

from trimtab.cluster.tensors import TensorChannel

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
SHAPES = ((), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4))


def travel(value):
    ours, theirs = (TensorChannel(end) for end in socket.socketpair())
    try:
        ours.send(value, 10.0)
        return theirs.receive()
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_and_shape(dtype: torch.dtype) -> None:
    given = [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for shape in SHAPES]
    for before, after in zip(given, travel(given), strict=True):
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        if dtype == torch.float8_e4m3fn:  # is not compared
            before, after = before.float(), after.float()
        assert torch.equal(after, before)


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12)[::3],
        torch.ones(1).expand(5),
        torch.ones(()).expand(2, 3),
        torch.arange(12)[4:6],
        torch.arange(4)[:0],
    ],
    ids=["transposed", "every third", "one expanded", "a number expanded", "a stretch", "none of it"],
)
def test_views(view: torch.Tensor) -> None:
    assert torch.equal(travel(view), view)


def test_what_is_received_can_be_written_to_and_is_nobody_elses() -> None:
    given = torch.zeros(3)
    found = travel({"a": given, "b": [given, None, "text"]})
    found["a"] += 1
    assert given.sum() == 0
    assert found["b"][1:] == [None, "text"]


def test_parameters_stay_parameters() -> None:
    found = travel(torch.nn.Parameter(torch.ones(2)))
    assert isinstance(found, torch.nn.Parameter)
    assert found.requires_grad
