"""RUN/now.json: what a run does at this moment, so that slow can be told from dead. A thread replaces it once a second.

The thread also calls whoever wants to look at the machine between steps (`every`). It is a daemon and ends with `close`. No
failure of it ends a run: a file that cannot be written is written a second later, or not.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.base.spans import SpanLog, log
from trimtab.record.layout import NOW_FILE

WRITE_EVERY_S = 1.0
LOOK_EVERY_S = 0.25
"""How often `every` is called."""
END_WITHIN_S = 10.0
"""How long `close` waits for a thread that a disk or a driver holds up."""


class Pulse:
    """`phase` and `step` are set by the thread that trains; reading them takes no lock."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        start: int,
        every: Sequence[Callable[[], object]] = (),
        clock: Callable[[], float] = time.time,
        spans: SpanLog = log,
    ) -> None:
        self._path, self._aside = str(folder / NOW_FILE), str(folder / f".{NOW_FILE}.writing")
        self._steps, self._start, self._every = steps, start, every
        self._process = {"pid": os.getpid(), "host": socket.gethostname()}
        self._clock, self._spans = clock, spans
        self._doing: tuple[str | None, float, str | None] = ("starting", clock(), None)
        self.step = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._cpu_s = self._told_s = 0.0

    def phase(self, name: str | None, what: str | None = None) -> None:
        """From now on it is in this phase; None: between two. `what`: in words, where there is no phase for it."""
        self._spans.progress = None
        self._doing = (name or "idle", self._clock(), what)

    @property
    def doing(self) -> str | None:
        return self._doing[0]

    def start(self) -> None:
        self.write()
        self._thread = threading.Thread(target=self._watch, name="trimtab-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The last state is written, and the thread has ended."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._end.set()
        thread.join(END_WITHIN_S)
        self._doing = (None, self._clock(), None)
        if not thread.is_alive():  # else it hangs in the same file
            self.write()

    def take_cost_s(self) -> float:
        """Processor seconds of the thread since the last call."""
        spent, self._told_s = self._cpu_s - self._told_s, self._cpu_s
        return spent

    def write(self) -> None:
        with suppress(OSError):
            file = os.open(self._aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.write(file, json.dumps(self.state()).encode() + b"\n")
            finally:
                os.close(file)
            os.replace(self._aside, self._path)  # not on disk when this returns: a second later there is another

    def state(self) -> dict[str, Any]:
        (phase, since, what), progress = self._doing, self._spans.progress
        done, total, unit = progress if progress is not None and phase != "idle" else (None, None, None)
        return {
            "at": round(self._clock(), 3),
            **self._process,
            "step": self.step,
            "steps": self._steps,
            "phase": phase,
            "since": round(since, 3),
            "done": done,
            "total": total,
            "unit": unit,
            "what": what,
            "start": self._start,
        }

    def _watch(self) -> None:
        written = time.monotonic()
        while not self._end.wait(LOOK_EVERY_S):
            for look in self._every:
                with suppress(Exception):  # one reading is missing then; without this thread the run would look dead
                    look()
            if time.monotonic() - written >= WRITE_EVERY_S:
                written = time.monotonic()
                self.write()
            self._cpu_s = time.thread_time()
