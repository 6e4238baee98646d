"""Memory of a device between processes, with a driver that only notes what it is asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.rollout.external import ipc
from trimtab.rollout.external.ipc import HANDLE_BYTES, NotShared, OpenedAllocations, export
from trimtab.rollout.external.messages import Weight, Weights
from trimtab.rollout.external.reading import Reader

BASE = 1_000_000


class Driver:
    """One allocation at BASE; what is opened gets the next address."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.refused = ""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 201 if name == self.refused else self.call(name, *arguments)

    def call(self, name: str, *arguments: Any) -> int:
        if name == "cuMemGetAddressRange_v2":
            arguments[0]._obj.value = BASE
        elif name == "cuIpcGetMemHandle":
            assert arguments[1].value == BASE, "of the allocation, not of the tensor"
            ctypes.memset(arguments[0], 7, HANDLE_BYTES)
        elif name == "cuIpcOpenMemHandle_v2":
            arguments[0]._obj.value = 100 * arguments[1].reserved[0]
            self.log.append(("open", arguments[1].reserved[0]))
        else:
            assert name == "cuIpcCloseMemHandle"
            self.log.append(("close", arguments[0].value // 100))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ipc, "_driver", lambda: made)
    monkeypatch.setattr(ipc, "_have_context", lambda: None)
    return made


def handle(number: int) -> bytes:
    return bytes([number]) * HANDLE_BYTES


def test_a_tensor_is_told_by_its_allocation_and_how_far_into_it(driver: Driver) -> None:
    assert export(BASE + 512) == (handle(7), 512)


def test_each_allocation_is_opened_once_and_closed_when_it_is_no_longer_named(driver: Driver) -> None:
    opened = OpenedAllocations()
    opened.only((handle(1), handle(2)))
    opened.only((handle(2), handle(3)))
    opened.only(())
    assert driver.log[:4] == [("open", 1), ("open", 2), ("open", 3), ("close", 1)]
    assert sorted(driver.log[4:]) == [("close", 2), ("close", 3)]


def test_bytes_are_those_at_the_offset(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the allocation that is named."""
    monkeypatch.setattr(ipc, "torch", SimpleNamespace(as_tensor=lambda found, device: found.__cuda_array_interface__))
    opened = OpenedAllocations()
    opened.only((handle(1), handle(2)))
    found: Any = opened.bytes_of(handle(2), 48, 16)
    assert found["data"][0] == 248 and found["shape"] == (16,)


def test_weights_that_cannot_be_opened_leave_those_before(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read from its own allocation, at its own place."""
    memory = {handle(1): torch.arange(8, dtype=torch.float32), handle(2): 10 + torch.arange(8, dtype=torch.float32)}

    def bytes_of(self: OpenedAllocations, which: bytes, offset: int, count: int) -> torch.Tensor:
        assert which in self._pointers
        return memory[which].view(torch.uint8)[offset : offset + count]

    monkeypatch.setattr(OpenedAllocations, "bytes_of", bytes_of)
    layout = (Weight("a", "float32", (2, 1), 8, 0), Weight("b", "float32", (3,), 4, 1))
    reader = Reader()
    reader.take(Weights(layout, None, (handle(1), handle(2))))
    driver.refused = "cuIpcOpenMemHandle_v2"
    with pytest.raises(NotShared, match="error 201"):
        reader.take(Weights(layout[:1], None, (handle(3),)))
    found = {name: value.tolist() for name, value in reader.read()}
    assert found == {"a": [[2.0], [3.0]], "b": [11.0, 12.0, 13.0]}
    driver.log.clear()
    reader.take(Weights((), "a file in host memory"))
    assert sorted(driver.log) == [("close", 1), ("close", 2)], "nothing of the trainer's is held any more"
