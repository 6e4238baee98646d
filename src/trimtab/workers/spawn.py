"""What all child processes have in common: they end with everything that they started, and the error says how they ended.

Each has guardians (guardian.py), which see to it, also when the trainer is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import psutil

KILL_TIMEOUT_S = 10.0
"""How long guardians may take to kill what is below them."""
PYTHON = (sys.executable, "-u", "-P")
KILL_FIRST, KILL_EARLY = 1000, 500
"""`oom_score_adj` of processes: the kernel kills the highest first when memory is short. The user's code comes first, for it may
leak and is replaced at once; engines, which take longer to replace, come before the trainer."""


def start(
    module: str,
    arguments: Sequence[object],
    *,
    fds: Sequence[int],
    env: Mapping[str, str],
    oom_score: int = KILL_FIRST,
    python: Sequence[str] = PYTHON,
    out: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that calls `main` of a module with the arguments, as text. What is returned is its first guardian, which
    ends when it does and in the same way."""
    command = [*python, "-m", "trimtab.workers.guardian", *map(str, (os.getpid(), oom_score, module, *arguments))]
    return subprocess.Popen(
        command, pass_fds=fds, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
    )


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End what `start` has started, and everything below it."""
    if process.poll() is not None:
        return
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:  # a guardian that somebody has stopped, or a program in its place that ignores it
        process.kill()
        for one in below:
            with contextlib.suppress(psutil.Error):
                one.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_TIMEOUT_S)


def how_it_ended(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit status {code}"
    hint = " (is the machine out of memory?)" if -code == signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"
