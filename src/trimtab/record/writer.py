"""The checkpoints of a run, written behind its training.

`save` fixes what is saved and returns; a thread writes it, one checkpoint at a time. Where the host has room, what is fixed is a
copy, and training goes on at once. Where it has not, the live tensors are read, and `before_change` waits until they are: whoever
changes weights or state calls it first. On a CUDA device without that room `save` itself waits, as a thread that talks to the
device would break a CUDA graph that is being captured; with it, the thread touches no device.

An error of a write is raised by the next call here that looks, in the words of a write that was waited for. One that ran out of
memory is repeated, as other work is (update/guard.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.model.memory import is_out_of_memory
from trimtab.record.behind import WriteBehind
from trimtab.record.host_copy import HostCopy
from trimtab.record.part import Part
from trimtab.record.saving import PendingCheckpoint, capture_part, write_checkpoint

RunGuarded = Callable[[str, Callable[[], Any]], Any]
"""Does some work, again with less memory where that runs out; the first argument is what it is called."""


class CheckpointWriter:
    """Writes the checkpoints of one process that has all of a run."""

    def __init__(self, device: torch.device, run: RunGuarded, copies: bool) -> None:
        """`copies`: the plan has host memory for a copy. Whether the host has it too is seen when it is taken."""
        self._run, self._on_cpu = run, device.type == "cpu"
        self._memory = HostCopy(device) if copies else None
        self._behind, self._preparing = WriteBehind(), WriteBehind()
        self._work: Callable[[], object] | None = None
        """What is under way."""
        self._reads_live_tensors = False
        self._waited_s = self._written_s = 0.0
        self.on_written: Callable[[float, float], None] = lambda begin, end: None
        """Told of each checkpoint: when its write began and ended, in seconds of `time.perf_counter`."""

    def prepare(self, size: int) -> None:
        """Take the memory for copies of so many bytes now, behind whatever comes next: new memory costs more than a copy."""
        memory = self._memory
        if memory is not None:
            self._preparing.start(lambda: memory.reserve(size))

    def save(self, collect: Callable[[], Part], pending: PendingCheckpoint) -> None:
        """Begin to write what `collect` gives, as it is now. The checkpoint before it is written when this returns."""
        with self._waiting():
            self._settle()
            self._preparing.wait()
            run_dir, step = pending.run_dir, pending.step
            part = self._run("checkpoint", lambda: capture_part(collect(), self._memory, run_dir, step))
            self._work = lambda: write_checkpoint(pending, part)
            self._reads_live_tensors = not part.is_copy
            self._behind.start(self._work)
            if self._reads_live_tensors and not self._on_cpu:
                self._settle()

    def before_change(self) -> None:
        """From here on tensors that are saved may change, or be moved."""
        if self._reads_live_tensors:
            self.wait()

    def wait(self) -> None:
        """All that was begun is on disk. Raises what kept it from that."""
        with self._waiting():
            self._settle()

    def raise_if_failed(self) -> None:
        """Raise what kept a checkpoint from disk, if that is known already."""
        if self._behind.ended:
            self.wait()

    def take_metrics(self) -> dict[str, float]:
        """Seconds since the last call in which training waited for checkpoints, and those that writing them took."""
        found = {"checkpoint/wait_s": self._waited_s, "checkpoint/write_s": self._written_s}
        self._waited_s = self._written_s = 0.0
        return {name: seconds for name, seconds in found.items() if seconds}

    def close(self) -> None:
        """Wait for what is under way; the memory for copies is given back."""
        try:
            self._preparing.wait()
            self.wait()
        finally:
            self._memory = None

    def _settle(self) -> None:
        """The write under way has ended well, or its error is raised."""
        work, self._work, short = self._work, None, None
        try:
            self._behind.wait()
        except BaseException as error:
            if self._behind.busy:  # a stop came while this waited; the write goes on
                self._work = work
                raise
            self._reads_live_tensors = False
            if not is_out_of_memory(error):
                raise
            short = str(error)
        self._reads_live_tensors = False
        for done in self._behind.take_done():
            self._written_s += done.seconds
            self.on_written(done.begin, done.end)
        if short is not None and work is not None:  # outside the `except` block, which keeps what the attempt held
            self._run("checkpoint", _failing_first(work, short))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - begin


def _failing_first(work: Callable[[], object], short: str) -> Callable[[], object]:
    """Work that has run out of memory elsewhere, for somebody who has to know that before it is repeated."""
    failures = [MemoryError(short)]

    def again() -> object:
        if failures:
            raise failures.pop()
        return work()

    return again
