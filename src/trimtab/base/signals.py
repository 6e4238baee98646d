"""Signals that stop a run: Ctrl-C, SIGTERM, SIGHUP.

The first one raises at once where that loses nothing. Where it would (a save, an update that is being applied), it waits until
that is done. Repeats are ignored from the first one on: GNU `timeout` sends two, a shell and the kernel may both send SIGHUP, and
none of them may abort the save that the first has begun. A signal that was ignored before (`nohup`) stays ignored, and a handler
of the caller's own is called, when it is time, in place of raising.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """Everything is closed as after Ctrl-C."""

    def __init__(self, signum: int) -> None:
        self.signum = signal.Signals(signum)
        super().__init__(f"stopped by {self.signum.name}")


class _Stops:
    """Handlers belong to the process, and so does this."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        """What handled each signal before."""
        self.holds: list[Callable[[], bool]] = []
        """A stop waits while any of these is true."""
        self.waiting: int | None = None
        self.announced = False
        self.raised: int | None = None

    def receive(self, signum: int, frame: FrameType | None) -> None:
        if self.raised is not None:
            return
        if any(hold() for hold in self.holds):
            self.waiting = self.waiting or signum
            return
        self.act(signum, frame)

    def act(self, signum: int, frame: FrameType | None = None) -> None:
        handler = self.handlers[signum]
        try:
            if not callable(handler):
                raise Terminated(signum)
            handler(signum, frame)
        except BaseException:
            self.raised = signum
            raise


_stops = _Stops()


@contextmanager
def take_signals(*, until_exit: bool = False) -> Iterator[None]:
    """Stop signals are handled as said above until the block ends; with `until_exit`, repeats of one that was raised are ignored
    for as long as the process takes to end after it. Nothing changes inside another such block, or in a thread."""
    global _stops
    if _stops.handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    _stops = taken = _Stops()
    found = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    taken.handlers = {s: handler for s, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for signum in taken.handlers:
            signal.signal(signum, taken.receive)
        yield
    finally:
        for signum, handler in taken.handlers.items():
            signal.signal(signum, signal.SIG_IGN if until_exit and taken.raised else handler)
        _stops = _Stops()


@contextmanager
def hold_stops(while_: Callable[[], bool] = lambda: True, *, raises: bool = True) -> Iterator[None]:
    """A stop that comes in this block, while the condition is true, waits. It is raised at the block's end if `raises`; an error
    of the block goes before it, as that ends the run, too."""
    _stops.holds.append(while_)
    try:
        yield
    finally:
        _stops.holds.remove(while_)
    if raises and not any(hold() for hold in _stops.holds):
        raise_waiting()


def raise_waiting() -> None:
    """Raise a stop that has waited, or one that was raised before and caught by somebody who should not have."""
    if _stops.raised is not None:
        raise KeyboardInterrupt if _stops.raised == signal.SIGINT else Terminated(_stops.raised)
    if _stops.waiting is not None:
        signum, _stops.waiting = _stops.waiting, None
        _stops.act(signum)


def newly_waiting() -> str | None:
    """The name of a pending stop that has not been reported yet."""
    if _stops.waiting is None or _stops.announced:
        return None
    _stops.announced = True
    return "Ctrl-C" if _stops.waiting == signal.SIGINT else signal.Signals(_stops.waiting).name
