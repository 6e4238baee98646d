"""A rank that has no model: what its orders do is for tests of the driver's end, of the rank's end and of collectives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trimtab.base.errors import DataError
from trimtab.base.spans import log
from trimtab.cluster.mesh import Meeting, Mesh
from trimtab.cluster.serve import Link, Orders, serve


class Toy(Orders):
    """`setup`: rank, ranks, port of the store and a prefix; None for the port: ranks do not meet."""

    def __init__(self, setup: tuple[int, int, int | None, str], link: Link) -> None:
        self.rank, self.ranks, port, prefix = setup
        self.link, self.steps = link, 0
        link.progress = lambda: self.steps
        if prefix == "refused" and self.rank == 1:
            raise DataError("this rank has no data")
        self.meet = lambda prefix, shards: Mesh(
            Meeting(port or 0, prefix, self.rank, self.ranks, "gloo", torch.device("cpu")), shards
        )
        if port is not None:
            self.mesh = self.meet(prefix, 1)

    def ready(self) -> int:
        return self.rank

    def facts_of_shortage(self) -> str:
        return f"rank {self.rank} was at step {self.steps}"

    def echo(self, value: Any) -> Any:
        return value

    def share(self, prefix: str, shards: int) -> None:
        """Meet again, so many to a set of parts."""
        self.mesh.leave()
        self.mesh = self.meet(prefix, shards)

    def collective(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """What a rank has of `values` after a collective."""
        getattr(self.mesh, name)(values)
        return values

    def refuse(self, rank: int) -> int:
        if self.rank == rank:
            raise DataError(f"rank {rank} refuses")
        return self.rank

    def run_short(self, rank: int) -> int:
        if self.rank == rank:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return self.rank

    def count(self, numbers: list[int], wait_s: float = 0.0) -> Iterator[int]:
        self.link.tell("note", f"rank {self.rank} counts")
        for number in numbers:
            time.sleep(wait_s)
            yield number

    def work(self, seconds: float, moves: bool) -> int:
        """Long work that goes on, or stands still."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
            self.steps += moves
            log.progress = (self.rank, 4, "pieces") if moves else None
        return self.rank

    def break_off(self, rank: int, how: str) -> None:
        """One rank ends while the others wait for it in a collective."""
        if self.rank != rank:
            self.mesh.sum(torch.ones(1))
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raised":
            raise ValueError("unexpected")
        elif how == "left":
            os._exit(3)

    def start_and_tell(self, file: str) -> None:
        Path(file).write_text(str(os.getpid()))
        time.sleep(1000)


def main(descriptor: str) -> None:
    serve(descriptor, Toy)
