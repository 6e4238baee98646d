"""An async worker: one process in which many calls are under way at once, for rewards that wait and do not compute.

Guarantees, those of the pool but for the deadline, which the process keeps for each sample (judge/client.py):
- Every request is answered exactly once, with values or with a Failure, unless the worker breaks or is closed.
- A process that ends is replaced, and so is one that says nothing for `SILENCE_TIMEOUT_S`, whatever blocks it. The calls that it
  had under way are sent again, once; a call that was there both times has failed.
- After `close` no process is left, nor after the trainer was killed (guardian.py).

One thread starts the process, feeds it, hears it and kills it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.base.errors import RewardError
from trimtab.reward.pool import RewardRequest
from trimtab.workers.messages import Cell, Failure, Tally, WorkerAnswer
from trimtab.workers.pool import LOAD_ATTEMPTS, LOAD_TIMEOUT_S, Reply
from trimtab.workers.process import POLL_S, Stopped, Worker, import_path
from trimtab.workers.user_code import UserCode

JUDGE_PROCESS = "trimtab.reward.judge.process"
SILENCE_TIMEOUT_S = 30.0
"""The process speaks every second."""
MAX_TRIES = 2


@dataclass
class PendingCall:
    request: RewardRequest
    message: bytes
    tries: int = 0


class AsyncWorker:
    """One process, any number of calls. Made when the parts have loaded and their endpoints answered; a RewardError otherwise."""

    def __init__(
        self, parts: Sequence[tuple[UserCode, dict[str, Any], float]], base_dir: Path, run_dir: Path | None = None
    ) -> None:
        """`parts`: source, arguments and the deadline of one sample. `run_dir`: where caches on disk go."""
        self._parts, self._path, self._run_dir = list(parts), import_path(base_dir), run_dir
        self._new: queue.SimpleQueue[RewardRequest] = queue.SimpleQueue()
        self._under_way: dict[int, PendingCall] = {}
        self._numbers = 0
        self._heard = 0.0
        self._stop = threading.Event()
        self._loaded = threading.Event()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._owner = os.getpid()
        self._error: BaseException | None = None
        self.needs: list[frozenset[str]] = []
        """Columns that each part needs."""
        self._thread = threading.Thread(target=self._drive, name="judge-worker", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self._error is not None:
            self.close()
            raise self._error

    def call(self, request: RewardRequest) -> None:
        self.raise_if_broken()
        self._new.put(request)
        self._wake_sender.send(b".")

    def raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise RuntimeError("the judge's process is closed")

    def close(self) -> None:
        """Kill the process. Calls under way are not answered. Harmless when repeated."""
        if os.getpid() != self._owner:
            return
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _drive(self) -> None:
        worker: Worker | None = None
        try:
            while not self._stop.is_set():
                fresh = worker is None
                worker = worker or self._start()
                try:
                    if fresh:
                        self._send_again(worker)
                    self._send_and_receive(worker)
                except (EOFError, ConnectionError, TimeoutError) as error:
                    worker.kill()
                    worker = None
                    self._fail_twice_tried(error)
        except Stopped:
            pass
        except BaseException as error:  # seen by whoever waits for rewards, who would otherwise wait forever
            self._error = self._error or error
        finally:
            self._loaded.set()
            if worker is not None:
                worker.kill()

    def _send_and_receive(self, worker: Worker) -> None:
        """Send what is new, and hear one message."""
        ready = select.select([worker.fileno(), self._wake_receiver.fileno()], [], [], POLL_S)[0]
        if self._wake_receiver.fileno() in ready:
            self._wake_receiver.recv(1 << 16)
        self._send_new(worker)  # also what was left when the process before this one ended
        if worker.fileno() in ready:
            self._heard = time.monotonic()
            answer = worker.hear(SILENCE_TIMEOUT_S)
            if isinstance(answer, WorkerAnswer):
                done = self._under_way.pop(answer.call)
                _reply(done.request, answer.result, answer.seconds, answer.tally)
        elif time.monotonic() - self._heard > SILENCE_TIMEOUT_S:
            raise TimeoutError

    def _send_new(self, worker: Worker) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._new.get_nowait()
                self._numbers += 1
                try:
                    asked = (self._numbers, request.part, request.count, request.timeout_s, request.arguments())
                    one = PendingCall(request, pickle.dumps(asked))
                except Exception as error:  # a column of the user's that cannot be pickled
                    words = f"cannot receive its arguments: {type(error).__name__}: {error}"
                    _reply(request, Failure("raised", words))
                    continue
                self._under_way[self._numbers] = one
                self._send(worker, one)

    def _send(self, worker: Worker, one: PendingCall) -> None:
        one.tries += 1
        worker.tell(one.message, SILENCE_TIMEOUT_S)

    def _send_again(self, worker: Worker) -> None:
        for one in self._under_way.values():
            self._send(worker, one)

    def _fail_twice_tried(self, error: Exception) -> None:
        silent = isinstance(error, TimeoutError)
        words = (
            f"has no result: its process was silent for {SILENCE_TIMEOUT_S:g} s"
            if silent
            else "has no result: its process ended"
        )
        for number, one in list(self._under_way.items()):
            if one.tries >= MAX_TRIES:
                del self._under_way[number]
                _reply(one.request, Failure("timeout" if silent else "crashed", f"{words}, {one.tries} times"))

    def _start(self) -> Worker:
        """A process that has loaded every part. Only the run's first tries the endpoints: later they may be down for a while."""
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            if self._stop.is_set():
                raise Stopped
            worker = Worker(self._stop, JUDGE_PROCESS)
            first = not self._loaded.is_set()
            try:
                answer = worker.ask(pickle.dumps((self._path, self._parts, self._run_dir, first)), LOAD_TIMEOUT_S)
            except BaseException:
                worker.kill()
                raise
            if not isinstance(answer, Failure):
                self.needs = answer
                self._heard = time.monotonic()
                self._loaded.set()
                return worker
            worker.kill()
            if first or attempt == LOAD_ATTEMPTS:
                break
            self._stop.wait(attempt)
        raise RewardError(str(answer) if answer.kind == "raised" else f"starting the judge {answer}")


def _reply(
    request: RewardRequest, result: list[Cell] | Failure, seconds: float = 0.0, tally: Tally | None = None
) -> None:
    """A call of several samples that failed as a whole is repeated for each of them, so only a single sample's counts."""
    tally = tally or Tally()
    if isinstance(result, Failure) and request.count == 1:
        tally.counts.update(["failed", f"failed_{result.kind}"])
    request.reply(Reply(result, seconds, tally))
