"""Ranks as peers of each other: torch.distributed, NCCL on GPUs and gloo elsewhere.

    ranks            0  1  2  3     4  5  6  7
    sets of parts   `---------'    `---------'     shard_devices: 4
    copies           0 and 4, 1 and 5, 2 and 6, 3 and 7 hold the same part

Sums only, never averages: every token's share of the loss was fixed before the work was dealt. All calls are in place, on flat
tensors whose length the number of parts divides (model/weights.py), so addresses of weights stay as they are.

A sum that is begun runs beside other work: NCCL's on a stream of its own, gloo's in threads of its own. It may wait there for a
rank that is a whole step behind; the driver sees ranks that hang (ranks.py), not the group's own timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimtab.model.sequence_way import AttentionSize
from trimtab.model.versions import abort_process_group, collective_trace, gather_flat, reduce_flat, wait_at_most
from trimtab.model.waits import CopyWaits
from trimtab.update.peers import Pending

T = TypeVar("T")
START_TIMEOUT = timedelta(minutes=10)
"""For ranks to find each other: they load models at different speed."""
STEP_TIMEOUT = timedelta(hours=24)
"""For collectives: one that was begun early waits for the slowest rank's passes, however long a step takes."""
STORE_TIMEOUT = timedelta(seconds=60)
LOCALHOST = "127.0.0.1"
TRACE_KEY = "trimtab-write-traces"
"""In the store where ranks meet: the driver has found that they hang."""


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other: at a store that the driver serves."""

    store_port: int
    prefix: str
    """Of this set of ranks there: another one may have been lost before."""
    rank: int
    ranks: int
    backend: str
    """nccl, or gloo where ranks have no GPU each."""
    device: torch.device
    store_host: str = LOCALHOST
    """The driver's machine."""

    def open_store(self) -> dist.TCPStore:
        return dist.TCPStore(self.store_host, self.store_port, is_master=False, timeout=STORE_TIMEOUT)


class GroupBroken(Exception):
    """Another rank has failed and freed those that waited for it in a collective."""


class Mesh:
    """This rank's view of all of them (update/peers.py)."""

    def __init__(self, meeting: Meeting, shards: int, sequences: Collection[int] = ()) -> None:
        """`shards`: ranks that hold one set of parts together. `sequences`: in groups of these sizes ranks run the same rows."""
        assert meeting.ranks % shards == 0
        self.rank, self.ranks = meeting.rank, meeting.ranks
        self.shards, self.shard = shards, meeting.rank % shards
        self._meeting, self._generation = meeting, 0
        self._watched = meeting.open_store()
        """A connection of its own, for the thread that looks for failed ranks."""
        self._traced = False
        self.seconds, self.bytes = 0.0, 0
        """Waited for collectives, and moved in them, since `take`."""
        self._sequence: dict[int, dist.ProcessGroup | None] = {}
        """By size: the ranks that run the same rows as this one."""
        self._sequence_sizes = tuple(sorted(sequences))
        self._stream_waits = CopyWaits() if meeting.backend == "nccl" else None
        """NCCL's calls return at once, and the device's stream waits."""
        self._join()

    def _join(self) -> None:
        meeting, shards = self._meeting, self.shards
        dist.init_process_group(
            meeting.backend,
            store=dist.PrefixStore(f"{meeting.prefix}-{self._generation}", meeting.open_store()),
            rank=self.rank,
            world_size=self.ranks,
            timeout=START_TIMEOUT,
            device_id=meeting.device if meeting.backend == "nccl" else None,
        )
        sets = [list(range(first, first + shards)) for first in range(0, self.ranks, shards)]
        copies = [list(range(first, self.ranks, shards)) for first in range(shards)]
        self._set = self._group_of(sets)
        self._copies = self._group_of(copies)
        for size in self._sequence_sizes:
            self._sequence[size] = self._group_of([list(range(r, r + size)) for r in range(0, self.ranks, size)])
        for group in {id(one): one for one in (None, self._set, self._copies, *self._sequence.values())}.values():
            wait_at_most(STEP_TIMEOUT, group)

    def sequence_group(self, size: int, sizes: tuple[AttentionSize, ...]) -> SequenceRanks | None:
        """The ranks that run the same rows as this one; None where it runs whole rows. `sizes`: of the model's attention."""
        return None if size == 1 else SequenceRanks(self, size, sizes)

    def leave(self) -> None:
        self._sequence = {}  # gloo frees ranks that wait for this one when nobody here holds the group
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        """This rank's work has failed: free those that wait for it in a collective. gloo's find the connection closed; NCCL's are
        told by the store (`leave_if_asked`)."""
        self._watched.set(self._abort_key, "1")
        self.leave()

    @property
    def joined(self) -> bool:
        return dist.is_initialized()

    @property
    def was_aborted(self) -> bool:
        """Some rank's work has failed since all joined."""
        return bool(self._watched.check([self._abort_key]))

    def leave_if_asked(self) -> None:
        """Called now and then from another thread: ends collectives that would wait for ever."""
        if self._meeting.backend == "nccl" and dist.is_initialized() and self.was_aborted:
            abort_process_group()

    def write_trace_if_asked(self, file: Path) -> None:
        """Called now and then from another thread: writes what collectives this rank has begun and ended, once."""
        if self._traced or not self._watched.check([TRACE_KEY]):
            return
        self._traced = True
        if (found := collective_trace(self._meeting.backend)) is not None:
            file.write_bytes(found)

    def rejoin(self) -> None:
        """Meet the others again, after `abort`."""
        self.leave()
        self._generation += 1
        vars(self).pop("device_mesh", None)  # its groups are gone
        self._join()

    @property
    def _abort_key(self) -> str:
        return f"{self._meeting.prefix}-{self._generation}-aborted"

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The same ranks as FSDP2 sees them: sets of parts, and copies of the set where there are several."""
        copies = self.ranks // self.shards
        device = self._meeting.device.type
        if copies == 1:
            return init_device_mesh(device, (self.shards,))
        return init_device_mesh(device, (copies, self.shards), mesh_dim_names=("copies", "parts"))

    def sum(self, values: torch.Tensor) -> None:
        self._timed(values, lambda: dist.all_reduce(values))

    def sum_into_parts(self, flat: torch.Tensor) -> None:
        if self.shards == 1:
            return self.sum(flat)
        own = self._own(flat)
        self._timed(flat, lambda: reduce_flat(own, flat, self._set))
        if self.ranks > self.shards:
            self._timed(own, lambda: dist.all_reduce(own, group=self._copies))
        return None

    def begin_sum(self, values: torch.Tensor) -> Pending:
        self.bytes += values.nbytes
        return _Begun(self, dist.all_reduce(values, async_op=True))

    def begin_sum_into_parts(self, flat: torch.Tensor) -> Pending:
        if self.shards == 1:
            return self.begin_sum(flat)
        own = self._own(flat)
        self.bytes += flat.nbytes
        begun = reduce_flat(own, flat, self._set, async_op=True)
        if self.ranks == self.shards:
            return _Begun(self, begun)
        return _Begun(self, begun, lambda: self._timed(own, lambda: dist.all_reduce(own, group=self._copies)))

    def sum_of_parts(self, values: torch.Tensor) -> None:
        if self.shards > 1:
            self._timed(values, lambda: dist.all_reduce(values, group=self._set))

    def gather(self, flat: torch.Tensor) -> None:
        if self.shards > 1:
            own = self._own(flat)
            self._timed(flat, lambda: gather_flat(flat, own, self._set))

    def send(self, values: torch.Tensor) -> None:
        self._timed(values, lambda: dist.broadcast(values, src=0))

    def tell(self, thing: T | None) -> T:
        told = [thing]
        dist.broadcast_object_list(told, src=0)
        assert told[0] is not None
        return told[0]

    def among_sequence(
        self, size: int, moved: torch.Tensor, collective: Callable[[dist.ProcessGroup | None], object]
    ) -> None:
        """A collective of the ranks that run the same rows as this one."""
        if size not in self._sequence:
            raise RuntimeError("the group of ranks was left: it cannot be used any more")
        self._timed(moved, lambda: collective(self._sequence[size]))

    def take(self) -> tuple[float, int]:
        """Seconds that were waited for collectives and bytes that they moved, since the last call."""
        if self._stream_waits is not None:
            torch.cuda.current_stream(self._meeting.device).synchronize()
            self.seconds += self._stream_waits.take_s() or 0.0
        found, self.seconds, self.bytes = (self.seconds, self.bytes), 0.0, 0
        return found

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        size = flat.shape[0] // self.shards
        return flat[self.shard * size : (self.shard + 1) * size]

    def _timed(self, moved: torch.Tensor, collective: Callable[[], object]) -> None:
        self.bytes += moved.nbytes
        with self.waiting():
            collective()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What the block waits for counts: the host's time, which with gloo is all of it, or the stream's."""
        if self._stream_waits is not None:
            with self._stream_waits.around(torch.cuda.current_stream(self._meeting.device)):
                yield
            return
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started

    def _group_of(self, all_groups: list[list[int]]) -> dist.ProcessGroup | None:
        """The group that this rank is in. Every rank makes all of them, in the same order, as torch demands."""
        if len(all_groups) == 1:
            return None  # the world
        made = {tuple(ranks): dist.new_group(ranks) for ranks in all_groups}
        return next(group for ranks, group in made.items() if self.rank in ranks)


class SequenceRanks:
    """See model/sequence.py. Consecutive ranks; it holds no process group, so that ranks can part and meet again."""

    def __init__(self, mesh: Mesh, ranks: int, sizes: tuple[AttentionSize, ...]) -> None:
        self.rank, self.ranks, self.sizes = mesh.rank % ranks, ranks, sizes
        self._mesh = mesh

    def exchange(self, x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        got = x.new_empty((sum(received), *x.shape[1:]))
        x = x.contiguous()
        self._mesh.among_sequence(self.ranks, x, lambda group: dist.all_to_all_single(got, x, received, sent, group))
        return got

    def gather(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        most = max(counts)
        if not most:
            return x
        own = x.contiguous()
        if len(own) < most:
            own = torch.cat((own, own.new_zeros((most - len(own), *own.shape[1:]))))
        got = x.new_empty((self.ranks * most, *x.shape[1:]))
        self._mesh.among_sequence(self.ranks, got, lambda group: gather_flat(got, own, group))
        if min(counts) == most:
            return got
        return torch.cat([part[:count] for part, count in zip(got.split(most), counts)])


class _Begun:
    """A sum that was begun (update/peers.py). Between sets of parts it goes on when it is waited for, so that dropping it needs
    only what all ranks have begun."""

    def __init__(self, mesh: Mesh, work: Any, between_sets: Callable[[], None] = lambda: None) -> None:
        self._mesh, self._work, self._between_sets = mesh, work, between_sets

    def wait(self) -> None:
        with self._mesh.waiting():
            self._work.wait()
        self._between_sets()

    def drop(self) -> None:
        self._work.wait()


def open_store(host: str = LOCALHOST) -> dist.TCPStore:
    """Where ranks meet; on a port that is free. It lives in the driver, so that ranks can meet again after one was lost. `host`:
    the driver's machine, as ranks see it."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
