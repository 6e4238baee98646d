"""Reward workers: a worker pool that calls reward functions (workers/pool.py says what it guarantees)."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.base.errors import RewardError
from trimtab.workers.places import Found, WorkerPlaces
from trimtab.workers.pool import Reply, WorkerPool, WorkerSpec
from trimtab.workers.process import import_path
from trimtab.workers.user_code import UserCode

PRELOAD = {"task": "reasoning_gym"}
"""Slow imports of built-ins. Where the trainer has made them a worker makes them at its start, not under a deadline."""


@dataclass(frozen=True)
class RewardRequest:
    """One call of one part. The answer's result is a list of cells, or a Failure."""

    part: int
    count: int
    """Samples in the call, and values in the answer."""
    timeout_s: float
    arguments: Callable[[], dict[str, Any]]
    reply: Callable[[Reply], None]
    again: bool = False
    """A sample of a failed call, called by itself."""
    home: None = None

    def message(self) -> Any:
        return self.part, self.count, self.arguments()


class RewardPool(WorkerPool):
    """Made when the functions have loaded in a worker; a RewardError otherwise."""

    def __init__(
        self,
        parts: list[tuple[UserCode, dict[str, Any]]],
        workers: int,
        base_dir: Path,
        places: WorkerPlaces | None = None,
    ) -> None:
        path = import_path(base_dir)

        def boot(found: Found) -> bytes:
            """What a worker needs to begin: the import path, what to import first, and the parts."""
            builtins = [source.name for source, _ in parts if source.kind == "builtin"]
            preload = [PRELOAD[name] for name in builtins if PRELOAD.get(name) in sys.modules]
            there = [(found.code(source), args) for source, args in parts]
            return pickle.dumps((found.path(path), preload, there))

        files = [source.place for source, _ in parts if source.kind == "file"] + [str(base_dir.resolve())]
        spec = WorkerSpec("trimtab.reward.worker", boot, "reward", "the reward functions", RewardError, files)
        super().__init__(spec, workers, places)

    @property
    def needs(self) -> list[frozenset[str]]:
        """Columns that each part needs."""
        found: list[frozenset[str]] = self.loaded
        return found
