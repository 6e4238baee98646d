"""Where worker processes run: on this machine, or on hosts of a cluster (cluster/ray_workers.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trimtab.workers.process import Worker
from trimtab.workers.user_code import UserCode


class AnyWorker(Protocol):
    """A worker process, started by and used from one thread (process.py)."""

    def ask(self, message: bytes, timeout_s: float) -> Any: ...

    def healthy(self) -> bool: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Found:
    """How a worker finds the user's code where it is."""

    path: Callable[[list[str]], list[str]] = lambda path: path
    """Its import path, by the trainer's."""
    file: Callable[[str], str] = lambda file: file
    """A file of the user's, by its name on the trainer's machine."""

    def code(self, code: UserCode) -> UserCode:
        return replace(code, place=self.file(code.place)) if code.kind == "file" else code


HERE = Found()


class WorkerPlaces(Protocol):
    """Where the workers of a pool are."""

    count: int
    """Hosts."""

    def start(
        self, number: int, stop: threading.Event, module: str, files: Sequence[str], again: bool
    ) -> tuple[AnyWorker, Found, str]:
        """Start the worker with this number: the worker, how it finds the user's code, and where it is, for errors. `files`: the
        user's, that it reads. `again`: in place of one that is gone, so anywhere."""
        ...


class ThisMachine:
    """See above."""

    count = 1

    def start(
        self, number: int, stop: threading.Event, module: str, files: Sequence[str], again: bool
    ) -> tuple[AnyWorker, Found, str]:
        return Worker(stop, module), HERE, ""
