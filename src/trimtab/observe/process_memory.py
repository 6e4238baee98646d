"""Resident memory of this process and its descendants, cheap enough to be read many times a second.

Which processes there are is looked up every few seconds, as that reads through all of a machine's; what each of them holds is one
read of a file that stays open. Shared pages count once a process.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import psutil

from trimtab.base.spans import SpanLog, log
from trimtab.base.units import GIB

REFRESH_EVERY_S = 10.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessTree:
    """May be read from any thread."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        """By process, the descriptor of its statm."""
        self._refreshed = -REFRESH_EVERY_S
        self._lock = threading.Lock()

    def rss_bytes(self) -> int:
        with self._lock:
            if time.monotonic() - self._refreshed >= REFRESH_EVERY_S:
                self._refresh()
            return sum(map(_rss, self._files.values()))

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files, self._refreshed = {}, -REFRESH_EVERY_S

    def _refresh(self) -> None:
        root = psutil.Process()
        found = {root.pid, *(child.pid for child in root.children(recursive=True))}
        for gone in self._files.keys() - found:
            os.close(self._files.pop(gone))
        for pid in found - self._files.keys():
            with contextlib.suppress(OSError):  # it has ended since
                self._files[pid] = os.open(f"/proc/{pid}/statm", os.O_RDONLY)
        self._refreshed = time.monotonic()


class HostPeaks:
    """The most that the process tree held in each phase, as far as samples show: at the end of a phase, and in between by a
    thread that calls `look`."""

    def __init__(self, tree: ProcessTree, spans: SpanLog = log) -> None:
        self._tree, self._spans = tree, spans
        self._open: list[str] = []
        self._peaks: dict[str, int] = {}

    def begin(self, name: str) -> None:
        self._open.append(name)

    def end(self) -> None:
        self._sample()
        self._open.pop()

    def look(self) -> None:
        if self._open:
            self._spans.count("process memory", time.perf_counter(), self._sample())

    def take(self) -> dict[str, float]:
        """Peaks by phase since the last call, in GiB."""
        found, self._peaks = self._peaks, {}
        return {name: peak / GIB for name, peak in found.items()}

    def _sample(self) -> int:
        held, peaks = self._tree.rss_bytes(), self._peaks
        for name in tuple(self._open):
            peaks[name] = max(held, peaks.get(name, 0))
        return held


def _rss(file: int) -> int:
    try:
        return int(os.pread(file, 128, 0).split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):  # it has ended
        return 0
