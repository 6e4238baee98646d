"""The ranks of one engine that is cut over devices: what they add up, gather and decide together.

All run the same schedule, so all come to the same calls in the same order. Two things keep it so where a rank is short of memory.
In the middle of a pass it gives back what it had and takes part in the rest of the pass's sums with zeros, so that nobody waits
for it. And before each pass and after each piece of work all say whether they are short (`vote`): if any is, the work has failed
on every rank, and all of them lower the same size.

Tensors go over a group of their own (NCCL where each rank has a GPU, else gloo); what is decided goes over gloo.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, TypeVarTuple

import torch
import torch.distributed as dist

from trimtab.model.memory import Shortage, attempt, is_out_of_memory

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
TIMEOUT = timedelta(hours=24)
"""The first rank may wait for work; the driver sees ranks that hang."""
FIRST = 0


class ShortElsewhere(MemoryError):
    """Another rank of the engine ran out of memory; all know."""


class Together:
    """One rank's end."""

    def __init__(self, store: dist.Store, rank: int, parts: int, device: torch.device, backend: str) -> None:
        self.rank, self.parts, self.device = rank, parts, device
        self._host: Any = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, parts, TIMEOUT)
        self._tensors: Any = self._host
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            self._tensors = dist.ProcessGroupNCCL(dist.PrefixStore("device", store), rank, parts, options)
        self.in_graphs = backend == "nccl"
        """What is added up can be part of a CUDA graph."""
        self.sums_of_a_pass = 0
        self._sums_left = 0
        self._listening = False

    @property
    def waits(self) -> int:
        """Grows while this rank waits for what the first one hears."""
        return int(time.monotonic()) if self._listening else 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """In place: the sum over all ranks, the same bits on each."""
        self._tensors.allreduce([values]).wait()
        self._sums_left -= 1
        return values

    def gather(self, values: torch.Tensor, vote: bool = True) -> torch.Tensor:
        """All ranks' values side by side along the last dimension. Nothing happens where a rank has no room for them."""
        values = values.contiguous()
        found = [torch.empty_like(values) for _ in range(self.parts)]
        if vote:
            self.refuse_short()
        self._tensors.allgather([found], [values]).wait()
        return torch.cat(found, -1)

    def vote(self, short: bool = False) -> bool:
        """True if any rank is short of memory."""
        said = torch.tensor([int(short)], dtype=torch.int32)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._host.allreduce([said], options).wait()
        return bool(said)

    def refuse_short(self) -> None:
        """Before work in which ranks wait for each other."""
        if self.vote():
            raise ShortElsewhere("out of memory on another rank of the engine")

    @contextmanager
    def whole_pass(self, tokens: int, hidden: int, dtype: torch.dtype) -> Iterator[None]:
        """A pass over so many tokens: this rank takes part in all of its sums, whatever happens."""
        self.refuse_short()
        self._sums_left = self.sums_of_a_pass
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # what they hold is given back first
            nothing = torch.zeros((tokens, hidden), dtype=dtype, device=self.device)
            while self._sums_left > 0:
                self.sum(nothing)
            raise

    def attempt(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result | Shortage:
        """What `work` gives; a Shortage on every rank if memory runs out on any."""
        told = False

        def watched() -> Result:
            nonlocal told
            try:
                return work(*args)
            except ShortElsewhere:
                told = True
                raise

        outcome = attempt(watched)
        if told:
            return outcome
        short = isinstance(outcome, Shortage)
        if self.vote(short) and not short:
            return Shortage("out of memory on another rank of the engine")
        return outcome

    def tell(self, news: Any) -> None:
        """Called on the first rank: give the others something to hear. None costs least."""
        data = b"" if news is None else pickle.dumps(news)
        self._broadcast(torch.tensor([len(data)]))
        if data:
            self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def of_first(self, mine: Result) -> Result:
        """What the first rank has found."""
        if self.rank == FIRST:
            self.tell(mine)
            return mine
        found: Result = self.hear()
        return found

    def hear(self) -> Any:
        self._listening = True
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        self._listening = False
        if not int(size):
            return None
        data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data)
        return pickle.loads(data.numpy().tobytes())

    def _broadcast(self, values: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = FIRST
        self._host.broadcast([values], options).wait()
