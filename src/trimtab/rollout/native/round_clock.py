"""When prefills and decode rounds of one `generate` began and ended, and what of that was the tail: for metrics and the trace.

On a CUDA device these are the device's own times, from events that the engine records anyway. They are read when a round has been
waited for, so reading them waits for nothing. The device's clock is laid on the host's by the round whose wait ended soonest.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from time import perf_counter

import torch

from trimtab.base.spans import log
from trimtab.rollout.engine import TAIL_SHARE
from trimtab.rollout.native.scheduler import Scheduler

MAX_GAP_S = 0.002
"""Between rounds that are one span in the trace."""
Moment = torch.cuda.Event | float
"""An event of the device, or a time of `perf_counter`."""


@dataclass
class _Launched:
    """Work that was given to the device together."""

    began: Moment
    filled: Moment | None = None
    """The end of its prefill, if it has one."""
    done: Moment | None = None
    """The end of its decode steps, if it has any."""
    prefill_tokens: int = 0
    sequences: int = 0
    steps: int = 0
    pages: int = 0
    tail: bool = False


class RoundClock:
    """One for each `generate`."""

    def __init__(self, usable: int) -> None:
        """`usable`: slots that the call could use at most."""
        self._usable = usable
        self._open: deque[_Launched] = deque()
        self.launched = 0
        """Pieces of work that were launched so far."""
        self._first: Moment | None = None
        self._offset = math.inf
        """`perf_counter` less the device's time, at most."""
        self._spans: list[tuple[str, float, float, dict[str, int]]] = []
        self._counts: list[tuple[float, int, int]] = []
        self.prefill_s = self.tail_s = 0.0

    def began(self, moment: Moment) -> None:
        """Work is about to be launched."""
        self._first = moment if self._first is None else self._first
        self._open.append(_Launched(moment))
        self.launched += 1

    def filled(self, moment: Moment, tokens: int) -> None:
        self._open[-1].filled, self._open[-1].prefill_tokens = moment, tokens

    def decoded(self, moment: Moment, sequences: int, steps: int, work: Scheduler) -> None:
        last = self._open[-1]
        last.done, last.sequences, last.steps, last.pages = moment, sequences, steps, work.pool.held
        to_come = work.waiting or work.filling or work.ready or work.preempted
        last.tail = not to_come and sequences < TAIL_SHARE * self._usable

    def looked_at(self, count: int) -> None:
        """The device has done the first `count` pieces of work."""
        now = perf_counter()
        while self.launched - len(self._open) < count:
            work = self._open.popleft()
            began = end = self._time(work.began)
            if work.filled is not None:
                end = self._time(work.filled)
                self.prefill_s += end - began
                self._spans.append(("prefill", began, end, {"tokens": work.prefill_tokens}))
            if work.done is not None:
                began, end = end, self._time(work.done)
                self.tail_s += (end - began) if work.tail else 0.0
                self._decoded(began, end, work)
            self._offset = min(self._offset, now - end)

    def _decoded(self, began: float, end: float, work: _Launched) -> None:
        """Rounds of as many sequences that follow each other are one span."""
        last = self._spans[-1] if self._spans else None
        if last and last[0] == "decode" and last[3]["sequences"] == work.sequences and began - last[2] < MAX_GAP_S:
            facts = {"sequences": work.sequences, "steps": last[3]["steps"] + work.steps}
            self._spans[-1] = ("decode", last[1], end, facts)
            return
        self._spans.append(("decode", began, end, {"sequences": work.sequences, "steps": work.steps}))
        self._counts.append((began, work.sequences, work.pages))

    def end(self) -> None:
        """Nothing more comes: give the trace what there was."""
        offset = 0.0 if isinstance(self._first, float) else self._offset
        for name, begin, end, facts in self._spans:
            log.add("engine", name, begin + offset, end + offset, **facts)
        for at, sequences, pages in self._counts:
            log.count("running sequences", at + offset, sequences)
            log.count("KV pages", at + offset, pages)
        if self._spans:
            last = self._spans[-1][2] + offset
            log.count("running sequences", last, 0)
            log.count("KV pages", last, 0)

    def _time(self, moment: Moment) -> float:
        """Seconds, by `perf_counter` or since the first event."""
        if isinstance(moment, float):
            return moment
        assert isinstance(self._first, torch.cuda.Event)
        return self._first.elapsed_time(moment) / 1e3
