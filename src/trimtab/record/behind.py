"""Work that is done behind the training: in a thread, one at a time, and no error of it is lost.

What `start` is given runs to its end, whatever the run does meanwhile: the interpreter does not end before it. An error waits
until somebody calls `start` or `wait`, and is raised there, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class WriteTime:
    """Work that has ended well, in seconds of `time.perf_counter`."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class WriteBehind:
    """A thread for one piece of work at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._outcome: WriteTime | None = None
        self._done: list[WriteTime] = []

    @property
    def busy(self) -> bool:
        """Some work has not ended, or its outcome was not asked for."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Some work has ended, and its outcome was not asked for."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, work: Callable[[], object]) -> None:
        """Begin some work, after the work before it has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="trimtab-write-behind")
        self._thread.start()

    def wait(self) -> None:
        """The work under way has ended, if there is any. Raises its error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert self._outcome is not None
        self._done.append(self._outcome)

    def take_done(self) -> list[WriteTime]:
        """The work that was found to have ended well since the last call."""
        done, self._done = self._done, []
        return done

    def _run(self, work: Callable[[], object]) -> None:
        begin = time.perf_counter()
        try:
            work()
        except BaseException as error:  # raised by whoever waits
            self._error = error
        else:
            self._outcome = WriteTime(begin, time.perf_counter())
