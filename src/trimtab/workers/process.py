"""A worker process, seen from the trainer: started, asked, and killed with everything that it started."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from trimtab.workers.messages import Failure, receive, send
from trimtab.workers.spawn import how_it_ended, kill_all, start

POLL_S = 0.1
"""How often a waiting thread looks at the deadline, at the worker's life and at `close`."""
EXIT_TIMEOUT_S = 5.0
"""How long after the end of its channel a worker may still be ending: first everything that it started is killed."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""Workers run while the trainer decodes: many processes with many threads each would slow both."""


class Stopped(Exception):
    """Whoever drives the worker is closing."""


class Worker:
    """One worker process, started by and used from one thread."""

    def __init__(self, stop: threading.Event, module: str) -> None:
        self._stop = stop
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(POLL_S)
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker; faulthandler writes to it
        fds = (theirs.fileno(), self._trace.fileno())
        self._process = start(module, fds, fds=fds, env=_environment())
        self._life = psutil.Process(self._process.pid)
        theirs.close()

    def ask(self, message: bytes, timeout_s: float) -> Any:
        """Send a message and wait for the answer. On a timeout or a crash the worker is of no further use."""
        deadline = time.monotonic() + timeout_s
        try:
            send(self._channel, message, lambda: self._check(deadline))
            return pickle.loads(receive(self._channel, lambda: self._check(deadline)))
        except TimeoutError:
            return Failure("timeout", f"took longer than {timeout_s:g} s and was stopped", self._where_it_hangs())
        except (EOFError, ConnectionError):
            stack = self._stack()
            return Failure("crashed", f"ended its process: {self._end()}", stack)

    def fileno(self) -> int:
        """Descriptor of the channel, to wait for what it says."""
        return self._channel.fileno()

    def tell(self, message: bytes, timeout_s: float) -> None:
        """Send a message whose answer may come at any time. A TimeoutError or an EOFError: the process is of no further use."""
        deadline = time.monotonic() + timeout_s
        send(self._channel, message, lambda: self._check(deadline))

    def hear(self, timeout_s: float) -> Any:
        """The next message, which may be the answer to any; errors as for `tell`."""
        deadline = time.monotonic() + timeout_s
        return pickle.loads(receive(self._channel, lambda: self._check(deadline)))

    def _check(self, deadline: float) -> None:
        if self._stop.is_set():
            raise Stopped
        if time.monotonic() >= deadline:
            raise TimeoutError
        # A child that user code forked in C can hold the channel open after the worker's death: EOF would never come.
        if self._ended():
            raise EOFError

    def _ended(self) -> bool:
        """Looks without reaping, so that the process id stays its own until `kill` has used it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._life.status() == psutil.STATUS_ZOMBIE
        return True

    def healthy(self) -> bool:
        """Between calls the channel is silent; anything to read is the end of the stream."""
        return not select.select([self._channel], [], [], 0)[0]

    def kill(self) -> None:
        """End the process and everything that it started."""
        if self._process.returncode is not None:
            return
        kill_all(self._process)
        self._channel.close()
        self._trace.close()

    def _where_it_hangs(self) -> str:
        """Ask faulthandler, which answers from a signal handler in C, also when Python code cannot run."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        for _ in range(25):
            time.sleep(0.02)
            if stack := self._stack():
                return stack
        return ""

    def _stack(self) -> str:
        text = os.pread(self._trace.fileno(), 1 << 16, 0).decode(errors="replace")
        ours = ("/reward/worker.py", "/reward/load.py", "/rollout/conversations/", "/workers/")
        names = (*(f"trimtab{name}" for name in ours), "<frozen runpy>")
        return "\n".join(line for line in text.splitlines() if not any(name in line for name in names)).strip()

    def _end(self) -> str:
        """Clean up after a crash, and say what it was."""
        patience = time.monotonic() + EXIT_TIMEOUT_S
        while not (ended := self._ended()) and time.monotonic() < patience:
            time.sleep(0.01)
        self.kill()
        code = self._process.returncode
        if not ended or code is None:
            return "it closed its channel"
        return how_it_ended(code)


def _environment() -> dict[str, str]:
    return package_environment() | ONE_THREAD


def package_environment() -> dict[str, str]:
    """The trainer's environment, in which a child process finds this package also when it runs from a checkout."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return environment


def import_path(base_dir: Path) -> list[str]:
    """Where a worker finds modules: as the trainer does, then in the configuration's folder and the current one."""
    here = os.getcwd()
    path = [entry or here for entry in sys.path]
    return path + [folder for folder in (str(base_dir.resolve()), here) if folder not in path]
