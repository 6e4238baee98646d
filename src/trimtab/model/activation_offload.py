"""Tensors that wait in host memory from the forward pass to the backward pass.

A tensor is copied out while the next layers run, and copied in while the layer after it in the backward pass is worked on. The
host waits for the copy of two tensors ago in both directions, so that no more than a few of them are on the device however far
it runs ahead. Host buffers are pinned and used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.model.transfer import HostMemory
from trimtab.model.waits import waits


@dataclass(eq=False)
class OffloadedTensor:
    """Where a tensor waits. `stored` and `arrived` are CUDA events."""

    buffer: HostMemory
    shape: torch.Size
    dtype: torch.dtype
    stored: Any = None
    fetched: torch.Tensor | None = None
    arrived: Any = None

    @property
    def waiting(self) -> torch.Tensor:
        return self.buffer.tensor(tuple(self.shape), self.dtype)


class ActivationOffload:
    """Holds tensors in host memory, last in, first out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []
        self._waiting: list[OffloadedTensor] = []
        self._free: list[tuple[HostMemory, Any]] = []
        """Buffers, and when the last copy from them is done."""
        self._recent: list[Any] = []
        """When the last copies, in either direction, are done."""

    def put(self, x: torch.Tensor) -> OffloadedTensor:
        buffer, read = self._buffer(x.nbytes)
        offloaded = OffloadedTensor(buffer, x.shape, x.dtype)
        if self._cuda:
            outward = self._streams[0]
            outward.wait_stream(torch.cuda.current_stream(self._device))
            if read is not None:
                outward.wait_event(read)
            with torch.cuda.stream(outward):
                offloaded.waiting.copy_(x, non_blocking=True)
            x.record_stream(outward)
            offloaded.stored = outward.record_event()
            self._keep_up(offloaded.stored)
        else:
            offloaded.waiting.copy_(x)
        self._waiting.append(offloaded)
        return offloaded

    def take(self, offloaded: OffloadedTensor) -> torch.Tensor:
        """The tensor again. The one that was put before it is fetched at the same time."""
        self._fetch(offloaded)
        self._waiting.remove(offloaded)
        if self._waiting:
            self._fetch(self._waiting[-1])
        x, offloaded.fetched = offloaded.fetched, None  # the offloaded lives as long as the graph
        assert x is not None, "taken twice"
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            with waits.around(current):
                current.wait_event(offloaded.arrived)
            x.record_stream(current)
        self._free.append((offloaded.buffer, offloaded.arrived))
        return x

    def clear(self) -> None:
        """Drop the tensors of a pass that failed."""
        for offloaded in self._waiting:
            offloaded.fetched = None
            self._free.append((offloaded.buffer, offloaded.arrived or offloaded.stored))
        self._waiting = []

    def _fetch(self, offloaded: OffloadedTensor) -> None:
        if offloaded.fetched is not None:
            return
        if not self._cuda:
            offloaded.fetched = offloaded.waiting.clone()
            return
        inward = self._streams[1]
        inward.wait_event(offloaded.stored)
        with torch.cuda.stream(inward):
            offloaded.fetched = torch.empty(offloaded.shape, dtype=offloaded.dtype, device=self._device)
            offloaded.fetched.copy_(offloaded.waiting, non_blocking=True)
        offloaded.arrived = inward.record_event()
        self._keep_up(offloaded.arrived)

    def _keep_up(self, done: Any) -> None:
        """Wait for the copy of two tensors ago: a copied tensor is the allocator's again only when the device is done with it."""
        self._recent.append(done)
        if len(self._recent) > 2:
            self._recent.pop(0).synchronize()

    def _buffer(self, size: int) -> tuple[HostMemory, Any]:
        for index, (buffer, _) in enumerate(self._free):
            if buffer.size >= size:
                return self._free.pop(index)
        if self._free:  # too small: a larger one takes its place
            self._free.pop()
        return HostMemory(-(-size // 2**20) * 2**20, self._device), None
