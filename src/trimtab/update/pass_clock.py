"""When micro-batches and optimizer steps began and ended: for `update/...` metrics and the trace.

On a CUDA device by its own events, which are read at the end of the step and never waited for; on a CPU by `perf_counter`.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import torch

from trimtab.base.spans import log
from trimtab.model.waits import waits

Moment = torch.cuda.Event | float


class PassClock:
    """The passes of one optimizer step, from when it is made: the device is idle then."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host = perf_counter()
        self._first = self._moment()
        self._micro_batches: list[tuple[Moment, int]] = []
        """The end of each, and its tokens."""
        self._applied: tuple[Moment, Moment] | None = None
        self._applying: Moment = self._first

    def ended(self, tokens: int) -> None:
        """A micro-batch's passes are launched."""
        self._micro_batches.append((self._moment(), tokens))

    def applying(self) -> None:
        self._applying = self._moment()

    def applied(self) -> None:
        self._applied = self._applying, self._moment()

    def read(self) -> tuple[float, float] | None:
        """Seconds of all passes and of applying them, which go to the trace, too; None where the device is not done."""
        if self._applied is None or not self._micro_batches or not self._done(self._applied[1]):
            return None
        at = begin = self._time(self._first)
        for number, (moment, tokens) in enumerate(self._micro_batches, 1):
            end = self._time(moment)
            log.add("update", "micro-batch", at, end, number=number, tokens=tokens)
            at = end
        first, last = map(self._time, self._applied)
        log.add("update", "optimizer step", first, last)
        return at - begin, last - first

    def _moment(self) -> Moment:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _done(self, moment: Moment) -> bool:
        return isinstance(moment, float) or moment.query()

    def _time(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        assert isinstance(self._first, torch.cuda.Event)
        return self._host + self._first.elapsed_time(moment) / 1e3


def update_parts(clocks: Iterable[PassClock]) -> dict[str, float]:
    """Where the update of a step went, in seconds, as metrics. Without those that are not known."""
    read = [clock.read() for clock in clocks]
    found: dict[str, float] = {}
    if read and all(each is not None for each in read):
        known = [each for each in read if each is not None]
        found["update/forward_backward_s"] = sum(passes for passes, _ in known)
        found["update/optimizer_s"] = sum(applied for _, applied in known)
    waited = waits.take_s()
    return found if waited is None else found | {"update/offload_wait_s": waited}
