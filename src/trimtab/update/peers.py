"""The other ranks of a run, as an optimizer sees them: sums of gradients over all ranks, and who holds which part of a unit.

With one device there are none (`ALONE`); cluster/mesh.py has the others. All calls are collectives: every rank makes the same
calls in the same order. None of them allocates memory in proportion to what it is given, and none averages: ranks only add. A
sum that was begun runs beside other work; what it is given is not touched before `wait`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Pending(Protocol):
    """A sum that was begun."""

    def wait(self) -> None:
        """The sum is there afterwards, for whatever the device is given to do next."""
        ...

    def drop(self) -> None:
        """Nobody wants the sum: wait only until the memory is free again. Needs nothing that other ranks have not begun."""
        ...


class Peers(Protocol):
    """What ranks do together."""

    rank: int
    """Number of this rank."""
    ranks: int
    """Ranks that share the work of a step."""
    shards: int
    """Ranks that hold one set of parts together: each unit is cut into so many equal stretches. 1: nothing is cut."""
    shard: int
    """Which stretch is this rank's."""

    def sum(self, values: torch.Tensor) -> None:
        """In place: the sum over all ranks."""
        ...

    def sum_into_parts(self, flat: torch.Tensor) -> None:
        """In place: this rank's stretch of `flat` becomes the sum over all ranks; the rest of `flat` means nothing afterwards."""
        ...

    def begin_sum(self, values: torch.Tensor) -> Pending:
        """`sum`, beside what follows."""
        ...

    def begin_sum_into_parts(self, flat: torch.Tensor) -> Pending:
        """`sum_into_parts`, beside what follows."""
        ...

    def sum_of_parts(self, values: torch.Tensor) -> None:
        """In place: the sum over the ranks that hold one set of parts together."""
        ...

    def gather(self, flat: torch.Tensor) -> None:
        """In place: each stretch of `flat` becomes what its holder has there."""
        ...

    def send(self, values: torch.Tensor) -> None:
        """In place: rank 0's values on all ranks."""
        ...

    def tell(self, thing: T | None) -> T:
        """Rank 0's thing on all ranks, pickled on the way."""
        ...


class NothingPending:
    """The sum over one rank."""

    def wait(self) -> None:
        return

    drop = wait


class Alone:
    """No other ranks."""

    ranks = shards = 1
    rank = shard = 0

    def sum(self, values: torch.Tensor) -> None:
        return

    sum_into_parts = sum_of_parts = gather = send = sum

    def begin_sum(self, values: torch.Tensor) -> Pending:
        return NothingPending()

    begin_sum_into_parts = begin_sum

    def tell(self, thing: T | None) -> T:
        assert thing is not None
        return thing


ALONE = Alone()
