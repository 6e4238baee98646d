"""Who has the engines of a run on several devices: each set of `run.rollout.tensor_parallel` ranks has one, over all its devices.

With four ranks and sets of two, rank 0 owns the first engine and rank 2 the second. 1 and 3 lend theirs to an engine of another
library, and are the native one's other ranks, which meet at a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

STORE_TIMEOUT = timedelta(minutes=10)
"""For ranks to find each other: they load models at different speed."""


@dataclass(frozen=True)
class EngineMeeting:
    """Where the ranks of engines that are cut over devices find each other."""

    host: str
    port: int
    prefix: str
    """Of this set of ranks there."""
    backend: str
    """nccl, or gloo where ranks have no GPU each."""


@dataclass(frozen=True)
class EngineSeat:
    """A rank's place in its set."""

    owner: bool = True
    """The set's engine is this rank's."""
    devices: tuple[torch.device, ...] = ()
    """That the engine spans; empty: those that it finds itself."""
    place: int = 0
    """Of this rank among those of its engine."""
    meeting: EngineMeeting | None = None
    ranks: int = 1
    """Of the run. With several, what one of them cannot start none may replace by something else."""

    def open_store(self) -> dist.Store:
        """Where the ranks of this engine alone meet."""
        assert self.meeting is not None
        store = dist.TCPStore(self.meeting.host, self.meeting.port, is_master=False, timeout=STORE_TIMEOUT)
        return dist.PrefixStore(self.meeting.prefix, store)


ONLY_SEAT = EngineSeat()
"""Of a run on one device."""


def seat_of(rank: int, devices: Sequence[str], parts: int, meeting: EngineMeeting | None = None) -> EngineSeat:
    """The seat of a rank, where engines are cut over so many devices. `devices`: of all ranks, as torch names them."""
    first = rank - rank % parts
    own = tuple(torch.device(name) for name in devices[first : first + parts])
    mine = None if meeting is None else replace(meeting, prefix=f"{meeting.prefix}-engine-{first}")
    return EngineSeat(rank == first, own, rank - first, mine, len(devices))


def owners(ranks: int, parts: int) -> list[int]:
    """The ranks that have engines."""
    return list(range(0, ranks, parts))
