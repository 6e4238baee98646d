"""Writes samples, results of evaluations and distributions.

Files of samples are written by a thread, so that a step does not wait for a disk; what keeps it from that
is raised at the end of the next step, or when a checkpoint is about to follow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.base.files import write_file
from trimtab.record.jsonl import dump_line
from trimtab.record.layout import DISTRIBUTIONS_FILE, SAMPLE_INDEX, eval_results_file
from trimtab.record.samples import Kind, write_samples
from trimtab.record.step_lines import StepLines


class RecordWriter:
    """For the thread that trains."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        """`resume_step`: see StepLines."""
        self._run_dir, self._resume_step = run_dir, resume_step
        self._index: StepLines | None = None
        self._distributions: StepLines | None = None
        self._queue: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._busy = False
        """The thread will look at the queue once more."""
        self._error: BaseException | None = None
        self._cpu_s = 0.0

    def samples(self, kind: Kind, step: int, rows: Sequence[dict[str, Any]]) -> None:
        if self._index is None:
            self._index = StepLines(self._run_dir / SAMPLE_INDEX, self._resume_step)
        index = self._index
        self._start(lambda: index.write(write_samples(self._run_dir, kind, step, rows)))

    def results(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The outcome of every prompt of an evaluation."""
        self._start(lambda: _write_lines(eval_results_file(self._run_dir, step), rows))

    def distributions(self, row: Mapping[str, Any]) -> None:
        if self._distributions is None:
            self._distributions = StepLines(self._run_dir / DISTRIBUTIONS_FILE, self._resume_step)
        self._distributions.write(row, compact=True)

    def raise_if_failed(self) -> None:
        """Raise what kept something from the disk, if that is known already."""
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """All that was begun is on disk, however long that takes: it is not worth less on a slow disk. Ctrl-C ends the wait.
        Raises what kept it from that."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_if_failed()

    def take_cost_s(self) -> float:
        """Processor seconds of the thread since the last call."""
        spent, self._cpu_s = self._cpu_s, 0.0
        return spent

    def close(self) -> None:
        """As `wait`, and nothing more comes."""
        try:
            self.wait()
        finally:
            for lines in filter(None, (self._index, self._distributions)):
                lines.close()

    def _start(self, work: Callable[[], object]) -> None:
        """Do some work behind whatever comes next, after what was given before."""
        with self._lock:
            self._queue.append(work)
            if self._busy:
                return
            self._busy = True
            self._thread = threading.Thread(target=self._run, name="trimtab-record")
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._cpu_s += time.thread_time()
                    self._busy = False
                    return
                work = self._queue.popleft()
            try:
                work()
            except BaseException as error:  # raised by whoever asks
                with self._lock:
                    self._error = self._error or error


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, map(dump_line, rows))
