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


@dataclass(eq=False)
class Ticket:
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


class Shelf:
    """Holds tensors in host memory, last in, first out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []
        self._tickets: list[Ticket] = []
        self._free: list[tuple[HostMemory, Any]] = []
        """Buffers, and when the last copy from them is done."""
        self._recent: list[Any] = []
        """When the last copies, in either direction, are done."""

    def put(self, x: torch.Tensor) -> Ticket:
        buffer, read = self._buffer(x.nbytes)
        ticket = Ticket(buffer, x.shape, x.dtype)
        if self._cuda:
            outward = self._streams[0]
            outward.wait_stream(torch.cuda.current_stream(self._device))
            if read is not None:
                outward.wait_event(read)
            with torch.cuda.stream(outward):
                ticket.waiting.copy_(x, non_blocking=True)
            x.record_stream(outward)
            ticket.stored = outward.record_event()
            self._keep_up(ticket.stored)
        else:
            ticket.waiting.copy_(x)
        self._tickets.append(ticket)
        return ticket

    def take(self, ticket: Ticket) -> torch.Tensor:
        """The tensor again. The one that was put before it is fetched at the same time."""
        self._fetch(ticket)
        self._tickets.remove(ticket)
        if self._tickets:
            self._fetch(self._tickets[-1])
        x, ticket.fetched = ticket.fetched, None  # the ticket lives as long as the graph
        assert x is not None, "taken twice"
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_event(ticket.arrived)
            x.record_stream(torch.cuda.current_stream(self._device))
        self._free.append((ticket.buffer, ticket.arrived))
        return x

    def clear(self) -> None:
        """Forget what nobody will take: a pass that failed."""
        for ticket in self._tickets:
            ticket.fetched = None
            self._free.append((ticket.buffer, ticket.arrived or ticket.stored))
        self._tickets = []

    def _fetch(self, ticket: Ticket) -> None:
        if ticket.fetched is not None:
            return
        if not self._cuda:
            ticket.fetched = ticket.waiting.clone()
            return
        inward = self._streams[1]
        inward.wait_event(ticket.stored)
        with torch.cuda.stream(inward):
            ticket.fetched = torch.empty(ticket.shape, dtype=ticket.dtype, device=self._device)
            ticket.fetched.copy_(ticket.waiting, non_blocking=True)
        ticket.arrived = inward.record_event()
        self._keep_up(ticket.arrived)

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
