"""The guardians of a process that a trainer starts: `python -m trimtab.workers.guardian TRAINER_PID OOM_SCORE MODULE
ARGUMENT...`.

    trainer ── guardian ── guardian ── MODULE.main(ARGUMENT...) ── whatever that starts

Guarantees:
- When the process ends, when its trainer is gone or when the first guardian gets a SIGTERM, everything that the process started
  is killed: also what left its process group or session, and what a double fork has made a daemon.
- Whichever one of trainer, guardians and process is killed, the others notice, and the same happens.
- The first guardian ends last, and as the process did: with its exit status, or by its signal.
- When memory is short the kernel chooses the process and what it started before the trainer; it hardly ever chooses a guardian,
  which is small.

Why nothing gets away: guardians are subreapers (prctl(2)), so a process whose parent is gone becomes a guardian's child, not
init's. A guardian kills its children until it has none. Out of reach are only processes of another user (sudo), and what
another service was asked to start (a container). Outside Linux, which alone has subreapers, the process group is killed.

Imports nothing but the standard library and starts no thread: it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
POLL_S = 1.0
"""How often a guardian looks whether the trainer is there, besides when the kernel says that a parent has gone (SIGHUP)."""
REAP_POLL_S = 0.005
CHILDREN = Path("/proc/thread-self/children")
OOM_SCORE = Path("/proc/self/oom_score_adj")


def main(trainer: int, oom_score: int, module: str, *arguments: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored would have children reaped before they are seen
    for _ in range(2):
        parent = os.getppid()
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        _prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
        child = os.fork()
        if child:
            _watch(child, parent, trainer)
    os.setsid()  # a process that kills its own group must not kill a guardian
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with contextlib.suppress(OSError):  # outside Linux, or where /proc cannot be written
        OOM_SCORE.write_text(str(max(oom_score, int(OOM_SCORE.read_text()))))
    sys.argv = [module, *arguments]
    importlib.import_module(module).main(*arguments)


def _watch(child: int, parent: int, trainer: int) -> NoReturn:
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # channels are the process's: their end is its end
    while True:
        if os.getppid() != parent or not _is_there(trainer):
            _kill_all_below(child)
            os._exit(1)
        number = _next_signal(POLL_S)
        if number == signal.SIGTERM:
            _kill_all_below(child)
            _end_by(signal.SIGTERM)
        if (status := _reap(child)) is not None:
            _kill_all_below(child)
            if os.WIFSIGNALED(status):
                _end_by(os.WTERMSIG(status))
            os._exit(os.WEXITSTATUS(status))
        if number == signal.SIGUSR1:  # asks where the process hangs
            os.kill(child, signal.SIGUSR1)


def _reap(child: int) -> int | None:
    """Reap whatever has ended, also processes that lost their parents; the status of `child` once that is among them."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                return found[1]
    return None


def _kill_all_below(child: int) -> None:
    """Kill children until there are none: those of a killed child become this process's own, and are next."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    out_of_reach: set[int] = set()
    while found := set(_children()) - out_of_reach:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                out_of_reach.add(pid)
        _reap(0)
        time.sleep(REAP_POLL_S)


def _children() -> list[int]:
    """Processes whose parent is this one, dead ones included."""
    if CHILDREN.exists():
        return list(map(int, CHILDREN.read_text().split()))
    import psutil

    return [child.pid for child in psutil.Process().children()]


def _end_by(number: int) -> NoReturn:
    """End this process by a signal, as another ended; without a core file of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(1)


def _next_signal(seconds: float) -> int | None:
    """Wait for one of those that are watched."""
    if hasattr(signal, "sigtimedwait"):
        found = signal.sigtimedwait(WATCHED, seconds)
        return found.si_signo if found else None
    time.sleep(seconds / 10)  # macOS
    waiting = signal.sigpending() & WATCHED
    return signal.sigwait(waiting) if waiting else None


def _is_there(process: int) -> bool:
    """Where a script stands between trainer and guardian, only the trainer's own process id says that it is gone."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, PermissionError):  # or it is somebody else's, under a number that was used again
        return False
    return True


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
