"""The checkpoints of a run, written behind its training.

`save` refuses what is not finite and returns; a thread writes, one checkpoint at a time. `before_change` is called by whoever is
about to change weights or state, and waits until they are read. Where the host has room for a copy, they are as soon as that is
taken: on the CPU the thread takes it, which is long done when a rollout has passed. From a CUDA device `save` takes it, as a
thread that talks to the device would break a CUDA graph that is being captured. Without that room they are read when the
checkpoint is written, and on a CUDA device `save` waits for that.

An error of a write is raised by the next call here that looks, in the words of a write that was waited for. One that ran out of
memory is repeated, as other work is (update/guard.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from trimtab.model.memory import is_out_of_memory
from trimtab.record.behind import WriteBehind
from trimtab.record.host_copy import HostCopy
from trimtab.record.part import CheckpointPart, copy_part
from trimtab.record.saving import PendingCheckpoint, refuse_diverged, write_checkpoint

POLL_S = 0.05
"""How often an update that waits for a copy looks whether it is still being taken."""
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
        self._read: threading.Event | None = None
        """Set when the live tensors of what is under way are read; None: nobody reads them."""
        self._waited_s = self._written_s = 0.0
        self.on_written: Callable[[float, float], None] = lambda begin, end: None
        """Told of each checkpoint: when its write began and ended, in seconds of `time.perf_counter`."""

    def prepare(self, size: int) -> None:
        """Take the memory for copies of so many bytes now, behind whatever comes next: new memory costs more than a copy."""
        memory = self._memory
        if memory is not None:
            self._preparing.start(lambda: memory.reserve(size))

    def save(self, collect: Callable[[], CheckpointPart], pending: PendingCheckpoint) -> None:
        """Begin to write what `collect` gives, as it is now. The checkpoint before it is written when this returns."""
        with self._waiting():
            self._settle()
            self._preparing.wait()
            part = self._run("checkpoint", lambda: _collected(collect, pending))
            copies = self._memory is not None and self._memory.reserve(part.nbytes)
            if copies and not self._on_cpu:
                assert self._memory is not None
                part, copies = self._run("checkpoint", partial(copy_part, part, self._memory)), False
                self._read = None
            else:
                self._read = threading.Event()
            self._work = _write(pending, part, self._memory if copies else None, self._read)
            self._behind.start(self._work)
            if self._read is not None and not self._on_cpu:
                self._settle()

    def before_change(self) -> None:
        """From here on tensors that are saved may change, or be moved."""
        if self._read is None:
            return
        with self._waiting():
            while not self._read.wait(POLL_S):
                if self._behind.ended:  # it has failed before it had read them all
                    self._settle()
                    return
        self._read = None

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
            self._read = None
            if not is_out_of_memory(error):
                raise
            short = str(error)
        self._read = None
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


def _collected(collect: Callable[[], CheckpointPart], pending: PendingCheckpoint) -> CheckpointPart:
    part = collect()
    refuse_diverged(part, pending.run_dir, pending.step)
    return part


def _write(
    pending: PendingCheckpoint, live: CheckpointPart, memory: HostCopy | None, read: threading.Event | None
) -> Callable[[], object]:
    """Work that writes a part, or a copy of it, and sets `read` when it needs the live tensors no more. If it is done again, the
    copy is not: by then the tensors may be others."""
    copied: list[CheckpointPart] = []

    def work() -> None:
        if memory is not None and not copied:
            copied.append(copy_part(live, memory))
            assert read is not None
            read.set()
        write_checkpoint(pending, copied[0] if copied else live)
        if read is not None:
            read.set()

    return work


def _failing_first(work: Callable[[], object], short: str) -> Callable[[], object]:
    """Work that has run out of memory elsewhere, for somebody who has to know that before it is repeated."""
    failures = [MemoryError(short)]

    def again() -> object:
        if failures:
            raise failures.pop()
        return work()

    return again
