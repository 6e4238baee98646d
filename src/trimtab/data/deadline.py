"""A rendering that loops is ended where it runs: rows are rendered while the model trains, and a template may loop on one of them
alone, which no trial of others finds.

A template is Python code once it is compiled, so an exception can be raised in its thread from outside. A single operation that
never ends, such as a power of powers, cannot be ended so; a template that has one on every row is found by the trial (trial.py).
Time is the rendering thread's own, where the system tells it: a busy machine ends nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab.base.errors import DataError
from trimtab.data.trial import MAX_TEXT_CHARACTERS, TEMPLATE_FIX

RENDER_TIMEOUT_S = 10.0
"""Time that one rendering has: it takes a millisecond or so."""
POLL_S = 0.5


def render_within(render: Callable[[], str], where: str) -> str:
    """What `render` gives; a DataError that begins with `where` if that takes too long, or if the text is too long to read."""
    timed = _watchdog.begin()
    try:
        try:
            text = render()
        finally:
            _watchdog.end(timed)
    except _TimeUp:
        _watchdog.end(timed)  # which may have been interrupted itself
        raise DataError(
            f"{where}: the tokenizer's chat template does not finish: it took more than {RENDER_TIMEOUT_S:.0f} s. "
            f"{TEMPLATE_FIX}"
        ) from None
    if len(text) > MAX_TEXT_CHARACTERS:
        raise DataError(
            f"{where}: the tokenizer's chat template writes more than {MAX_TEXT_CHARACTERS:,} characters for one conversation. "
            f"{TEMPLATE_FIX}"
        )
    return text


class _TimeUp(BaseException):
    """Not an Exception: what a template refuses is one."""


@dataclass(eq=False)
class _Timed:
    """A rendering that goes on, the time its thread had used before, and whether it has been told to end."""

    thread: int
    clock: Callable[[], float]
    began: float = field(init=False)
    told: bool = False

    def __post_init__(self) -> None:
        self.began = self.clock()


class _Watchdog:
    """One thread that looks at what is rendered, for as long as anything is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._going: list[_Timed] = []
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> _Timed:
        timed = _Timed(threading.get_ident(), _clock_of_this_thread())
        with self._lock:
            self._going.append(timed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="trimtab-renderings", daemon=True)
                self._thread.start()
        self._busy.set()
        return timed

    def end(self, timed: _Timed) -> None:
        with self._lock:
            if timed in self._going:
                self._going.remove(timed)
            if timed.told:  # perhaps it has ended just now, and has not seen it yet
                _raise_in(timed.thread, None)

    def _watch(self) -> None:
        while True:
            self._busy.wait()
            time.sleep(POLL_S)
            with self._lock:
                if not self._going:
                    self._busy.clear()
                for timed in self._going:
                    if timed.clock() - timed.began > RENDER_TIMEOUT_S:
                        timed.told = True  # and once more at the next look: a callback of C code may swallow it
                        _raise_in(timed.thread, _TimeUp)


def _clock_of_this_thread() -> Callable[[], float]:
    """Seconds of processor time of the calling thread, which another thread may ask for; else seconds that pass."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise this in a thread at its next step; None: nothing after all."""
    raised = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


_watchdog = _Watchdog()


def _anew() -> None:
    """A forked child has no other thread, and the lock may have been held by one."""
    global _watchdog
    _watchdog = _Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_anew)
