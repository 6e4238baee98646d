"""A process that runs an engine (workers/program.py), in the environment that holds the engine's library."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.base.package import PACKAGE
from trimtab.rollout.external.messages import Failed
from trimtab.workers.program import ProcessLost, ProgramProcess, wait_for

SILENCE_TIMEOUT_S = 300.0
"""A process that steps says so every second, and reads between steps; one step may compile something."""
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of the trainer's allocator that engines must not have: memory of expandable segments cannot be given up."""


class EngineLost(ProcessLost):
    """The engine's process died, hangs or gave up. Its log is there until the process is closed."""


class EngineProcess(ProgramProcess):
    """One process, from its start to its end."""

    lost_as = EngineLost

    def __init__(self, kind: str, python: str, variables: dict[str, str]) -> None:
        self.waited: Callable[[], None] = lambda: None
        """Called again and again while an answer is waited for."""
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-engine-")
        log = Path(self._folder.name) / "log"
        super().__init__("trimtab.rollout.external.worker", [kind], log, self._environment(variables), python=[python])

    def send(self, message: Any, seconds: float = SILENCE_TIMEOUT_S) -> None:
        super().send(message, seconds)

    def receive(self, seconds: float) -> Any:
        """The next message; EngineLost where none comes."""
        deadline = time.monotonic() + seconds
        while (message := self.take()) is None:
            if time.monotonic() > deadline:
                raise self.silent(seconds)
            wait_for([self])
            self.waited()
        return message

    def take(self) -> Any:
        """A message that is there, or None; EngineLost where none will come."""
        message = super().take()
        if isinstance(message, Failed):
            raise self.lost(message.text, message.out_of_memory)
        return message

    def silent(self, seconds: float) -> ProcessLost:
        return self.lost(f"its process has not answered for {seconds:.0f} s")

    def close(self, patience_s: float = 5.0) -> None:
        """No process is left, nor anything that it started, and no file."""
        super().close(patience_s)
        self._folder.cleanup()

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        """The trainer's variables, with this package on PYTHONPATH but none of its neighbours: the process must import its own
        torch."""
        beside = Path(self._folder.name) / "path"
        beside.mkdir()
        (beside / "trimtab").symlink_to(PACKAGE)
        found = os.environ | variables
        found["PYTHONPATH"] = os.pathsep.join([str(beside), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {
            name: value for name, value in found.items() if name not in ALLOCATORS or "expandable_segments" not in value
        }
