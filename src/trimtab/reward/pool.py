"""Reward workers: processes that can be killed, and the threads that drive them.

Guarantees:
- Every request is answered exactly once, with values or with a Failure, unless the pool breaks or is closed.
- A call has a deadline, in monotonic time, that starts when its worker receives it: time in the queue and the loading
  of a fresh worker do not count. A call that misses it costs its own worker, killed with everything that it started.
- No head-of-line blocking: whichever worker is free takes the next request, first calls before repeated ones.
- After `close` no worker process is left. When the trainer is killed, the workers die too (see worker.py).

One thread drives one worker: it starts it, feeds it and kills it. Nothing is shared but the queue.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trimtab.errors import RewardError
from trimtab.reward.load import Source
from trimtab.reward.wire import Cell, Failure, Tally, receive, send

LOAD_TIMEOUT_S = 300.0
"""For the imports of all reward functions; they may load a model of their own."""
LOAD_ATTEMPTS = 3
"""For a worker that replaces another: its functions did load before, so a failure may pass."""
SLICE_S = 0.1
"""How often a waiting thread looks at the deadline, at the worker's life and at `close`."""
PRELOAD = {"task": "reasoning_gym"}
"""Slow imports of built-ins. Where the trainer has made them a worker makes them at its start, not under a deadline."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""Rewards run while the trainer decodes: many processes with many threads each would slow both."""


@dataclass(frozen=True)
class Reply:
    """The answer to one request."""

    result: list[Cell] | Failure
    seconds: float
    """In the worker."""
    tally: Tally | None = None
    """What a judge counted; None for other rewards."""


@dataclass(frozen=True)
class Request:
    """One call of one part."""

    part: int
    count: int
    """Samples in the call, and values in the answer."""
    timeout_s: float
    arguments: Callable[[], dict[str, Any]]
    """Built in the driving thread, so that the queue holds no copies."""
    reply: Callable[[Reply], None]
    """Called in the driving thread, once."""
    again: bool = False
    """A sample of a failed call, called by itself: it waits behind all first calls, for it may hang."""


class Stopped(Exception):
    """The pool is closing."""


class Worker:
    """One worker process, started by and used from one thread."""

    def __init__(self, stop: threading.Event, module: str = "trimtab.reward.worker") -> None:
        self._stop = stop
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(SLICE_S)
        self._trace = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker; faulthandler writes to it
        fds = (theirs.fileno(), self._trace.fileno())
        command = [sys.executable, "-u", "-P", "-m", module, *map(str, fds), str(os.getpid())]
        self._process = subprocess.Popen(
            command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True, env=_environment()
        )
        self._life = psutil.Process(self._process.pid)
        theirs.close()

    def ask(self, message: bytes, timeout_s: float) -> Any:
        """Send a message and wait for the answer. On a timeout or a crash the worker is of no further use."""
        deadline = time.monotonic() + timeout_s
        try:
            send(self._channel, message, lambda: self._check(deadline))
            return pickle.loads(receive(self._channel, lambda: self._check(deadline)))
        except TimeoutError:
            return Failure("timeout", f"took longer than {timeout_s:g} s and was ended", self._where_it_hangs())
        except (EOFError, ConnectionError):
            stack = self._stack()
            return Failure("crashed", f"ended its process: {self._end()}", stack)

    def fileno(self) -> int:
        """Of the channel, to wait for what it says."""
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
        """End the process and all that it started, in its process group or out of it."""
        if self._process.returncode is not None:
            return
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            descendants = self._life.children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._channel.close()
        self._trace.close()

    def _where_it_hangs(self) -> str:
        """Ask faulthandler, which answers from a signal handler in C, also when Python code cannot run."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        for _ in range(10):
            time.sleep(0.02)
            if stack := self._stack():
                return stack
        return ""

    def _stack(self) -> str:
        text = os.pread(self._trace.fileno(), 1 << 16, 0).decode(errors="replace")
        ours = ("trimtab/reward/worker.py", "trimtab/reward/load.py", "<frozen runpy>")
        return "\n".join(line for line in text.splitlines() if not any(name in line for name in ours)).strip()

    def _end(self) -> str:
        """Clean up after a crash, and say what it was."""
        patience = time.monotonic() + 1
        while not (ended := self._ended()) and time.monotonic() < patience:
            time.sleep(0.01)
        self.kill()
        code = self._process.returncode
        if not ended or code is None:
            return "it closed its channel"
        if code >= 0:
            return f"exit status {code}"
        hint = " (is the machine out of memory?)" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"


def _environment() -> dict[str, str]:
    """The trainer's environment, in which the worker finds this package also when it runs from a checkout."""
    environment = {**os.environ, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false"}
    root = str(Path(__file__).resolve().parents[2])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return environment


def import_path(base_dir: Path) -> list[str]:
    """Where a worker finds modules: as the trainer does, then in the configuration's folder and the current one."""
    here = os.getcwd()
    path = [entry or here for entry in sys.path]
    return path + [folder for folder in (str(base_dir.resolve()), here) if folder not in path]


class Pool:
    """Worker processes behind one queue. Made when the functions have loaded in a worker; a RewardError otherwise."""

    def __init__(self, parts: list[tuple[Source, dict[str, Any]]], workers: int, base_dir: Path) -> None:
        self._path, self._parts = import_path(base_dir), parts
        self._queue: queue.PriorityQueue[tuple[bool, int, Request | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._loaded = threading.Event()
        self._owner = os.getpid()
        self._error: BaseException | None = None
        self.needs: list[frozenset[str]] = []
        """Columns that each part needs."""
        self._threads = [threading.Thread(target=self._drive, name=f"reward-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()
        self._loaded.wait()
        if self._error is not None:
            self.close()
            raise self._error

    def call(self, request: Request) -> None:
        self.raise_if_broken()
        self._queue.put((request.again, next(self._numbers), request))

    def raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise RuntimeError("the reward workers are closed")

    def close(self) -> None:
        """Kill every worker. Calls under way are not answered. Harmless when repeated."""
        if os.getpid() != self._owner:  # an exit handler in a fork of the trainer: these workers are not its own
            return
        self._stop.set()
        for number in range(1, len(self._threads) + 1):
            self._queue.put((False, -number, None))  # before everything else that waits
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _drive(self) -> None:
        """Keep one worker and feed it until the pool closes."""
        worker: Worker | None = None
        try:
            while True:
                worker = worker or self._start()
                _, _, request = self._queue.get()
                if request is None:
                    break
                if not worker.healthy():  # died between two calls: that is nobody's failure
                    worker.kill()
                    worker = self._start()
                reply = self._serve(worker, request)
                if isinstance(reply.result, Failure) and reply.result.kind in ("timeout", "crashed"):
                    worker.kill()
                    worker = None
                request.reply(reply)
        except Stopped:
            pass
        except BaseException as error:  # seen by whoever waits for rewards, who would otherwise wait forever
            self._error = self._error or error
        finally:
            self._loaded.set()
            if worker is not None:
                worker.kill()

    def _serve(self, worker: Worker, request: Request) -> Reply:
        try:
            message = pickle.dumps((request.part, request.count, request.arguments()))
        except Exception as error:  # a column of the user's that cannot be pickled
            return Reply(Failure("raised", f"cannot be sent its arguments: {type(error).__name__}: {error}"), 0.0)
        start = time.monotonic()
        result = worker.ask(message, request.timeout_s)
        return Reply(result, time.monotonic() - start)

    def _boot(self) -> bytes:
        """What a worker needs to begin: the import path, what to import first, and the parts."""
        builtins = [source.name for source, _ in self._parts if source.kind == "builtin"]
        preload = [PRELOAD[name] for name in builtins if PRELOAD.get(name) in sys.modules]
        return pickle.dumps((self._path, preload, self._parts))

    def _start(self) -> Worker:
        """A worker that has loaded every part."""
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            if self._stop.is_set():
                raise Stopped
            worker = Worker(self._stop)
            try:
                answer = worker.ask(self._boot(), LOAD_TIMEOUT_S)
            except BaseException:
                worker.kill()
                raise
            if not isinstance(answer, Failure):
                self.needs = answer
                self._loaded.set()
                return worker
            worker.kill()
            if not self._loaded.is_set() or attempt == LOAD_ATTEMPTS:
                break
            self._stop.wait(attempt)
        raise RewardError(str(answer) if answer.kind == "raised" else f"importing the reward functions {answer}")
