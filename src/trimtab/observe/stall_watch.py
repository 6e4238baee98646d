"""Ends a run on one device whose work stands still: a kernel that hangs, a driver that does not answer.

Several devices are watched by the driver (cluster/ranks.py). Here a thread looks at the progress of the one that trains. Where it
stands for longer than it may, the stacks of all threads are in RUN/stacks.txt, and the training thread is sent an error, which
ends the run as any other. A thread that is stuck in the device's driver does not hear of it: then the process ends. Checkpoints
are whole or not there, so the run goes on with --resume.

Only phases are watched in which the device works. What waits for others (rewards, a disk, the user's own functions) has limits of
its own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.base.errors import TrainingError
from trimtab.record.layout import STACKS_FILE

WATCHED_PHASES = ("rollout", "score", "update", "publish", "eval")
STALL_STEPS = 5
"""Work that stands still for so many predicted steps hangs."""
MIN_STALL_S = {"cuda": 60.0, "cpu": 600.0}
"""Work that stands still for less does not. On a CPU one micro-batch of a large model may take minutes."""
FIRST_STALL_S = 900.0
"""The same before anything was done: kernels are compiled then."""
GRACE_S = 120.0
"""How long the training thread has to end by itself, and to save the last whole step."""
EXIT_STATUS = 1


class RunHangs(TrainingError):
    """Raised in the thread that trains, wherever it is: so without arguments."""

    def __init__(self) -> None:
        super().__init__(
            f"the run made no progress and was ended; what it was doing is in {STACKS_FILE} of the run folder"
        )


class StallWatch:
    """`look` is called again and again from another thread than the one that trains."""

    def __init__(
        self,
        folder: Path,
        stall_s: float,
        doing: Callable[[], tuple[str | None, int | None]],
        progress: Callable[[], Any],
        tell: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """Made in the thread that trains. `doing`: phase and step. `progress`: compares unequal to what it was if work went on.
        `tell`: called with what happened, before the run ends."""
        self._folder, self._stall_s, self._doing, self._progress, self._tell = folder, stall_s, doing, progress, tell
        self._clock, self._end = clock, end
        self._trainer = threading.get_ident()
        self._seen: Any = None
        self._moved = clock()
        self._first: int | None = None
        """The step that this process began with: kernels are compiled in it."""
        self._raised: float | None = None

    def look(self) -> None:
        """Once or more a second."""
        now, (phase, step) = self._clock(), self._doing()
        seen = (phase, step, self._progress())
        if self._first is None:
            self._first = step
        if seen != self._seen or (self._raised is None and phase not in WATCHED_PHASES):
            self._seen, self._moved = seen, now
            return
        stood = now - self._moved
        if self._raised is not None:
            if stood > GRACE_S and now - self._raised > GRACE_S:
                self._give_up()
        elif stood > (max(self._stall_s, FIRST_STALL_S) if step == self._first else self._stall_s):
            self._raised = now
            self._tell(
                f"no progress for {stood:.0f} s in {phase}: the run ends. The stacks of its threads are in "
                f"{self._folder / STACKS_FILE}"
            )
            self._write_stacks()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._trainer), ctypes.py_object(RunHangs))

    def close(self) -> None:
        """The thread that trains has ended its work: what was raised has arrived."""
        self._seen, self._raised = None, None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._trainer), None)

    def _write_stacks(self) -> None:
        with suppress(OSError), (self._folder / STACKS_FILE).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _give_up(self) -> None:
        """Children end with this process (workers/guardian.py)."""
        with suppress(OSError, ValueError):
            sys.stderr.write(f"error: {RunHangs()}. Continue from the newest checkpoint with --resume\n")
            sys.stderr.flush()
        self._end(EXIT_STATUS)
