"""Who has the engines of a run on several devices: each set of `run.rollout.tensor_parallel` ranks has one, over all its devices.

With four ranks and sets of two, rank 0 owns the first engine and rank 2 the second; 1 and 3 lend them their devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EngineSeat:
    """A rank's place in its set."""

    owner: bool = True
    """The set's engine is this rank's."""
    devices: tuple[torch.device, ...] = ()
    """That the engine spans; empty: those that it finds itself."""
    ranks: int = 1
    """Of the run. With several, what one of them cannot start none may replace by something else."""


ONLY_SEAT = EngineSeat()
"""Of a run on one device."""


def seat_of(rank: int, devices: Sequence[str], parts: int) -> EngineSeat:
    """The seat of a rank, where engines are cut over so many devices. `devices`: of all ranks, as torch names them."""
    first = rank - rank % parts
    own = tuple(torch.device(name) for name in devices[first : first + parts])
    return EngineSeat(rank == first, own, len(devices))


def owners(ranks: int, parts: int) -> list[int]:
    """The ranks that have engines."""
    return list(range(0, ranks, parts))
