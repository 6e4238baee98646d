"""The program of a rank that only measures: how fast the network is between nodes of a cluster (`trimtab doctor --cluster`)."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from trimtab.cluster.mesh import Meeting, Mesh
from trimtab.cluster.serve import Link, Orders, serve

MODULE = "trimtab.cluster.link_rank"


@dataclass(frozen=True)
class LinkSetup:
    """What such a rank is made from."""

    store_host: str
    store_port: int
    rank: int
    ranks: int
    backend: str
    device: str


class LinkRank(Orders):
    """One a node."""

    def __init__(self, setup: LinkSetup, link: Link) -> None:
        self._device, self._rank, self._rounds = torch.device(setup.device), setup.rank, 0
        link.progress = lambda: self._rounds
        meeting = Meeting(
            setup.store_port, "links", setup.rank, setup.ranks, setup.backend, self._device, setup.store_host
        )
        self._mesh = Mesh(meeting, 1)

    def exchange(self, one: int, other: int, size: int, rounds: int) -> float | None:
        """Bytes a second from one of two ranks to the other and back; None on the others. The first round is not counted."""
        if self._rank not in (one, other):
            return None
        data = torch.zeros(size, dtype=torch.uint8, device=self._device)
        started = 0.0
        for number in range(rounds + 1):
            if number == 1:
                started = time.perf_counter()
            if self._rank == one:
                dist.send(data, other)
                dist.recv(data, other)
            else:
                dist.recv(data, one)
                dist.send(data, one)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._rounds += 1
        return 2 * rounds * size / (time.perf_counter() - started)


def main(descriptor: str) -> None:
    serve(descriptor, LinkRank)
