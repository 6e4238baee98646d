"""Processes of the tests: which run, which are gone. Nothing here waits without a deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import psutil

DEADLINE_S = 30.0


def runs(process: psutil.Process) -> bool:
    """A zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def left(processes: Iterable[psutil.Process], seconds: float = DEADLINE_S) -> list[psutil.Process]:
    """Those that still run at the deadline."""
    found = list(processes)
    wait_for(lambda: not any(map(runs, found)), seconds)
    return list(filter(runs, found))


def wait_for(happens: Callable[[], object], seconds: float = DEADLINE_S) -> bool:
    deadline = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def guarded(guardian: int) -> psutil.Process:
    """The process below the two guardians of which the trainer knows the first."""
    (second,) = psutil.Process(guardian).children()
    return next(child for child in second.children() if child.cmdline() == second.cmdline())
