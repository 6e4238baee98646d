"""A pool: worker processes that run the user's code, and the threads that drive them.

Guarantees:
- Every call is answered exactly once, with a result or with a Failure, unless the pool breaks or is closed.
- A call has a deadline, in monotonic time, that starts when its worker receives it: time in the queue and the loading
  of a fresh worker do not count. A call that misses it costs its own worker, killed with everything that it started.
- No head-of-line blocking: whichever worker is free takes the next call, first calls before repeated ones. A call that has
  a home waits for that one worker, which takes it before others.
- After `close` no worker process is left, nor anything that one started; nor after the trainer was killed (guardian.py).

One thread drives one worker: it starts it, feeds it and kills it. Nothing is shared but the queue.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

from trimtab.base.errors import TrimtabError
from trimtab.workers.messages import Failure, Tally
from trimtab.workers.places import AnyWorker, Found, ThisMachine, WorkerPlaces
from trimtab.workers.process import Stopped

LOAD_TIMEOUT_S = 300.0
"""For the imports of the user's code; it may load a model of its own."""
LOAD_ATTEMPTS = 3
"""For a worker that replaces another: its code did load before, so a failure may pass."""


@dataclass(frozen=True)
class Reply:
    """The answer to one call."""

    result: Any
    """What the worker said, or a Failure."""
    seconds: float
    """Time that it took in the worker."""
    tally: Tally | None = None
    """What a judge counted; None for others."""
    worker: int = 0
    """Which one answered."""


class WorkerCall(Protocol):
    """One call."""

    @property
    def timeout_s(self) -> float: ...

    @property
    def again(self) -> bool:
        """It waits behind all first calls, for it may hang."""
        ...

    @property
    def home(self) -> int | None:
        """The only worker that can serve it; None: any."""
        ...

    def message(self) -> Any:
        """What the worker is sent. Built in the driving thread, so that the queue holds no copies."""
        ...

    @property
    def reply(self) -> Callable[[Reply], None]:
        """Called in the driving thread, once."""
        ...


@dataclass(frozen=True)
class WorkerSpec:
    """What a pool is made for."""

    module: str
    """Run as the worker process."""
    boot: Callable[[Found], bytes]
    """The first message, by how a worker finds the user's code; its answer is `WorkerPool.loaded`, or a Failure."""
    name: str
    """In names of threads and in errors: what the workers are."""
    importing: str
    """In errors: what they load."""
    error: type[TrimtabError]
    files: Sequence[str] = ()
    """Of the user's code, with absolute paths."""


class WorkerPool:
    """Workers behind one queue. Made when the user's code has loaded in one of them on each host; the spec's error otherwise."""

    def __init__(self, spec: WorkerSpec, workers: int, places: WorkerPlaces | None = None) -> None:
        """`workers`: on each host. `places`: where they are; None: on this machine."""
        self._spec = spec
        self._places = places or ThisMachine()
        workers *= self._places.count
        self._untried = set(range(self._places.count))
        """Hosts on which no worker has loaded yet."""
        self._queue = _Queue(workers)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._owner = os.getpid()
        self._error: BaseException | None = None
        self.loaded: Any = None
        """What a worker said of the code that it loaded."""
        self._threads = [
            threading.Thread(target=self._drive, args=(i,), name=f"{spec.name}-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        self._ready.wait()
        if self._error is not None:
            self.close()
            raise self._error

    def call(self, call: WorkerCall) -> None:
        self.raise_if_broken()
        self._queue.put(call)

    def raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise RuntimeError(f"the {self._spec.name} workers are closed")

    def close(self) -> None:
        """Kill every worker. Calls under way are not answered. Harmless when repeated."""
        if os.getpid() != self._owner:  # an exit handler in a fork of the trainer: these workers are not its own
            return
        self._stop.set()
        self._queue.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _drive(self, number: int) -> None:
        """Keep one worker and feed it until the pool is closed."""
        worker: AnyWorker | None = None
        try:
            while True:
                worker = worker or self._start(number)
                call = self._queue.get(number)
                if call is None:
                    break
                if not worker.healthy():  # died between two calls: that is nobody's failure
                    worker.kill()
                    worker = self._start(number)
                reply = _serve(worker, call, number)
                if isinstance(reply.result, Failure) and reply.result.kind in ("timeout", "crashed"):
                    worker.kill()
                    worker = None
                call.reply(reply)
        except Stopped:
            pass
        except BaseException as error:  # seen by whoever waits for answers, who would otherwise wait forever
            self._error = self._error or error
        finally:
            self._ready.set()
            if worker is not None:
                worker.kill()

    def _start(self, number: int) -> AnyWorker:
        """A worker that has loaded everything."""
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            if self._stop.is_set():
                raise Stopped
            again = attempt > 1 or number % self._places.count not in self._untried
            worker, found, where = self._places.start(number, self._stop, self._spec.module, self._spec.files, again)
            try:
                answer = worker.ask(self._spec.boot(found), LOAD_TIMEOUT_S)
            except BaseException:
                worker.kill()
                raise
            if not isinstance(answer, Failure):
                self.loaded = answer
                self._untried.discard(number % self._places.count)
                if not self._untried:
                    self._ready.set()
                return worker
            worker.kill()
            if not self._ready.is_set() or attempt == LOAD_ATTEMPTS:
                break
            self._stop.wait(attempt)
        said = str(answer) if answer.kind == "raised" else f"importing {self._spec.importing} {answer}"
        raise self._spec.error(f"{said}{where}")


def _serve(worker: AnyWorker, call: WorkerCall, number: int) -> Reply:
    try:
        message = pickle.dumps(call.message())
    except Exception as error:  # a column of the user's that cannot be pickled
        failure = Failure("raised", f"cannot receive its arguments: {type(error).__name__}: {error}")
        return Reply(failure, 0.0, worker=number)
    start = time.monotonic()
    result = worker.ask(message, call.timeout_s)
    return Reply(result, time.monotonic() - start, worker=number)


class _Queue:
    """Calls in the order they came, first calls before repeated ones; each worker's own before those of all."""

    def __init__(self, workers: int) -> None:
        self._anyone: list[tuple[bool, int, WorkerCall]] = []
        self._own: list[list[tuple[bool, int, WorkerCall]]] = [[] for _ in range(workers)]
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, call: WorkerCall) -> None:
        with self._changed:
            line = self._anyone if call.home is None else self._own[call.home]
            heappush(line, (call.again, next(self._numbers), call))
            self._changed.notify_all()

    def get(self, worker: int) -> WorkerCall | None:
        """Waits for the next one; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._own[worker] or self._anyone)
            if self._closed:
                return None
            return heappop(self._own[worker] or self._anyone)[2]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
