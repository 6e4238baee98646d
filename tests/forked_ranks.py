"""Ranks that are forked from the test's own process, guardians and all, instead of started anew.

That spares each of them the import of torch and transformers, which takes longer than a tiny run. And what a test has patched in
its own process is patched in its ranks: so it lets a rank run out of memory, die or hang at a place of its choice.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import IO

import pytest
import torch

from trimtab.workers import guardian, program
from trimtab.workers.spawn import KILL_FIRST, PYTHON, start

POLL_S = 0.01


class ForkedProcess:
    """What `subprocess.Popen` is to a started process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("fork", seconds or 0.0)
            time.sleep(POLL_S)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork(
    module: str,
    arguments: Sequence[object],
    *,
    fds: Sequence[int],
    env: Mapping[str, str],
    oom_score: int = KILL_FIRST,
    python: Sequence[str] = PYTHON,
    out: IO[bytes] | None = None,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """See `trimtab.workers.spawn.start`. What another interpreter runs (an engine) is started."""
    if tuple(python) != tuple(PYTHON):
        return start(module, arguments, fds=fds, env=env, oom_score=oom_score, python=python, out=out)
    trainer = os.getpid()
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    status = 1
    try:
        assert out is not None
        _be_a_new_process(out.fileno(), fds, env)
        guardian.main(trainer, oom_score, module, *map(str, arguments))
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _be_a_new_process(out: int, fds: Sequence[int], env: Mapping[str, str]) -> None:
    """Nothing of the test's is left: its signals, its streams, its open files."""
    gc.freeze()  # what the test has left to be collected (a store whose thread is not here) is not this process's to end
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    first = 3
    for kept in sorted(fds):
        os.closerange(first, kept)
        first = kept + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def fork_ranks(patch: pytest.MonkeyPatch | None = None) -> None:
    """From now on ranks are forked. Without `patch`, for the rest of this process."""
    if patch is None:
        program.start = fork  # type: ignore[attr-defined]
    else:
        patch.setattr(program, "start", fork)


def this_rank() -> int | None:
    """The number of the rank that this process is; None in the driver."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else None
