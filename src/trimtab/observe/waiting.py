"""Shows what the command waits for: on a terminal one line that is updated in place, in a log one line for each long wait.

Imports nothing heavy, so that it works while torch is being imported. A separate thread writes, so the waiting code may block.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

TELL_AFTER_S = 0.8
"""In a log, shorter waits are not worth a line; within two seconds all are told, also by a thread that gets its turn late."""
REDRAW_S = 0.25
CLEAR_LINE = "\r\x1b[K"


class Waiting:
    """Use `on` when a wait begins and `done` when there is something else to see. `clock`: seconds, for tests."""

    def __init__(
        self, file: IO[str], terminal: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`terminal`: redraw in place; None: where `file` is one."""
        self._file = file
        self._terminal = file.isatty() if terminal is None else terminal
        self._clock = clock
        self._lock = threading.RLock()
        self._what: str | None = None
        self._since = 0.0
        self._shown = False
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def on(self, what: str) -> None:
        """From now on it waits for this."""
        with self._lock:
            self._clear()
            self._what, self._since, self._shown = what, self._clock(), False
            if self._thread is None:
                self._closed = threading.Event()
                self._thread = threading.Thread(target=self._watch, name="waiting", daemon=True)
                self._thread.start()
            if self._terminal:
                self.tell()

    def done(self) -> None:
        """Nothing is waited for, and the line is free."""
        with self._lock:
            self._clear()
            self._what = None

    @contextmanager
    def free_line(self) -> Iterator[None]:
        """What the body prints has a line of its own; the wait goes on."""
        with self._lock:
            self._clear()
            yield

    def close(self) -> None:
        self.done()
        self._closed.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def tell(self) -> None:
        """Write the line if it is due; the thread asks again and again."""
        with self._lock:
            waited = self._clock() - self._since
            if self._what is None or (not self._terminal and (self._shown or waited < TELL_AFTER_S)):
                return
            seconds = f" ({waited:.0f} s)" if self._terminal and waited >= 1 else ""
            self._file.write(
                f"{CLEAR_LINE * self._terminal}{self._what} ...{seconds}{'' if self._terminal else chr(10)}"
            )
            self._file.flush()
            self._shown = True

    def _clear(self) -> None:
        if self._shown and self._terminal:
            self._file.write(CLEAR_LINE)
            self._file.flush()
            self._shown = False

    def _watch(self) -> None:
        closed = self._closed
        while not closed.wait(REDRAW_S):
            self.tell()


@contextmanager
def waiting(file: IO[str], what: str) -> Iterator[None]:
    """While the body runs, it says so."""
    line = Waiting(file)
    line.on(what)
    try:
        yield
    finally:
        line.close()
