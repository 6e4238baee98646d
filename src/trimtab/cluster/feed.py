"""A rank's end of the one queue: what the driver says while the rank generates, and what it is told.

    driver -> rank    More: further requests;  GiveBack: some of what is not started;  End: the last message of a call
    rank -> driver    Item(Report): what there is to do, when that has changed;  Item(Returned): the answer to each GiveBack;
                      Item(Leaving): the rank's work has failed, and it waits for End

A thread reads what the driver says, so that neither end waits for the other to read. It ends with End, which the driver sends
exactly once for each `generate`; only then does the rank answer the order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from trimtab.cluster.serve import Link
from trimtab.rollout.engine import Request
from trimtab.rollout.feed import Bounds, CutRequest, Load, News

POLL_S = 0.5
"""How often a rank that waits for work counts that it is alive."""


@dataclass(frozen=True)
class More:
    requests: list[Request]


@dataclass(frozen=True)
class GiveBack:
    samples: int


@dataclass(frozen=True)
class End:
    """Nothing of this call is waited for any more."""


@dataclass(frozen=True)
class Report:
    received: int
    """Samples that this rank was given so far in this call."""
    load: Load


@dataclass(frozen=True)
class Returned:
    cuts: list[CutRequest]
    received: int
    load: Load


@dataclass(frozen=True)
class Leaving:
    """Nothing more comes from this rank but its answer."""


class DriverFeed:
    """See rollout/feed.py. As a context: when it is left, the driver's last message has been read."""

    def __init__(self, link: Link, bounds: Bounds, samples: int) -> None:
        """`samples`: what the rank begins with."""
        self.bounds = bounds
        self.waits = 0
        """Grows while the rank waits for work: it is alive."""
        self._link, self._received = link, samples
        self._reported: Report | None = None
        self._ended = False
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> DriverFeed:
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._ended and not isinstance(error, EOFError | ConnectionError):
            self._link.give(Leaving())
        self._reader.join()

    def exchange(self, load: Load) -> News:
        self._report(Report(self._received, load))
        requests: list[Request] = []
        wait = load.idle
        while True:
            try:
                message = self._inbox.get(timeout=POLL_S) if wait else self._inbox.get_nowait()
            except queue.Empty:
                if not wait:
                    return News(requests)
                self.waits += 1
                continue
            wait = False
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, End):
                self._ended = True
                return News(last=True)
            if isinstance(message, GiveBack):
                return News(requests, give_back=message.samples)
            requests += message.requests
            self._received += sum(request.samples for request in message.requests)

    def returned(self, cuts: Sequence[CutRequest], load: Load) -> None:
        self._reported = Report(self._received, load)
        self._link.give(Returned(list(cuts), self._received, load))

    def _report(self, report: Report) -> None:
        if report != self._reported:
            self._reported = report
            self._link.give(report)

    def _read(self) -> None:
        try:
            while True:
                message = self._link.receive()
                self._inbox.put(message)
                if isinstance(message, End):
                    return
        except (EOFError, OSError) as error:
            self._inbox.put(error if isinstance(error, EOFError) else EOFError(str(error)))
