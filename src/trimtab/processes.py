"""What all processes that a trainer starts have in common: they end with everything that they started, and how is told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import psutil


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session of its own, and all that it started, in its process group or, while it runs, out of
    it."""
    if process.returncode is not None:
        if not psutil.pid_exists(process.pid):  # or its number is another's by now
            _kill_group(process.pid)
        return
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(process.pid).children(recursive=True)
    _kill_group(process.pid)
    for child in descendants:
        with contextlib.suppress(psutil.Error):
            child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    hint = " (is the machine out of memory?)" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
