"""Batches between the policy that samples and the one that learns.

The batch of step s is sampled by the policy after s - k steps (k is `learn.staleness`; the first k + 1 batches by the first one),
every token of it, whatever takes how long. With k = 0 that is the policy that learns from it. So timing changes nothing that is
learned, and a batch's rewards may be computed while the policy learns from the batches before it.

Where the generator has weights of its own (`Generator.apart`), batches are sampled in a thread while the policy learns. It ends
before new weights are published: `settle`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from trimtab.base.spans import log
from trimtab.record.batches import SampledBatch, batch_files
from trimtab.run.roles import Session
from trimtab.run.rollout_step import sample_batch, score_batch

POLL_S = 0.5
"""How often whoever waits for the thread looks for a signal."""
END_TIMEOUT_S = 30.0


class Buffer:
    """See roles.py: sampled and not learned from yet, the oldest first."""

    def __init__(self, batches: Iterable[SampledBatch] = (), interrupt: Callable[[], None] = lambda: None) -> None:
        """`interrupt`: makes a generator fail that is at work in another thread."""
        self._batches = deque(batches)
        self._interrupt = interrupt
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def next(self, run: Session) -> SampledBatch:
        learn, first = run.config.learn, run.state.step + len(self._batches)
        due = range(first, min(run.state.step + learn.staleness + 1, learn.steps))
        if run.generator.apart and due:
            self._thread = threading.Thread(target=self._sample, args=(run, due), name="trimtab-rollout", daemon=True)
            self._thread.start()
            with run.observer.phase("rollout"):
                self._wait(lambda: bool(self._batches))
        else:
            for step in due:
                self._batches.append(sample_batch(run, step, run.observer.phase))
        batch = self._batches[0]
        if learn.staleness:
            waiting = len(self._batches) + (self._thread is not None and self._thread.is_alive())
            batch.metrics |= {"buffer/batches": float(waiting), "rollout/version_lag": _lag(run, batch)}
        if not batch.scored:
            score_batch(run, batch, run.observer.phase)
        return self._batches.popleft()

    def settle(self, run: Session) -> None:
        if self._thread is not None:
            with run.observer.phase("rollout"):
                self._wait(lambda: False)

    def snapshot(self) -> Callable[[], Mapping[str, bytes]]:
        return partial(batch_files, tuple(self._batches))

    def close(self) -> None:
        """No thread is left."""
        if self._thread is not None and self._thread.is_alive():
            self._interrupt()
            self._thread.join(END_TIMEOUT_S)

    def _sample(self, run: Session, due: Sequence[int]) -> None:
        """The thread."""
        try:
            for step in due:
                batch = sample_batch(run, step, _beside)
                with self._changed:
                    self._batches.append(batch)
                    self._changed.notify_all()
        except BaseException as error:  # belongs to whoever waits for the batch: it would be lost here
            self._failure = error
        with self._changed:
            self._changed.notify_all()

    def _wait(self, enough: Callable[[], bool]) -> None:
        """Until there is enough, or the thread has ended."""
        assert self._thread is not None
        with self._changed:
            while not enough() and self._thread.is_alive() and self._failure is None:
                self._changed.wait(POLL_S)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if not self._thread.is_alive():
            self._thread = None


def _lag(run: Session, batch: SampledBatch) -> float:
    """How many updates the policy is ahead of the one that sampled, for the mean token."""
    versions = torch.cat([t.versions for group in batch.groups for t in group.trajectories])
    return run.state.version - float(versions.double().mean())


@contextmanager
def _beside(name: str, memory: str | None = None) -> Iterator[None]:
    """What is done while the loop does something else is no phase of it: the trace shows it on a track of its own."""
    with log.span("rollout beside the update", name):
        yield
