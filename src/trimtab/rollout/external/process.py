"""A process that runs an engine: started, spoken to, watched and killed.

Nothing ever waits for a process that is dead, and not longer than asked for one that is silent. What it wrote is in a file,
the end of which goes into errors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from trimtab.base.package import PACKAGE
from trimtab.rollout.external.messages import Failed
from trimtab.workers.messages import Channel
from trimtab.workers.spawn import KILL_EARLY, how_it_ended, kill_all, start

POLL_S = 0.2
LAST_LINES = 25
STOP_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 300.0
"""A process that steps says so every second, and reads between steps; one step may compile something."""
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables of the trainer's allocator that engines must not have: memory of expandable segments cannot be given up."""


class EngineLost(Exception):
    """The process died, hangs or gave up."""

    def __init__(self, why: str, out_of_memory: bool = False, lines: str = "", log: Path | None = None) -> None:
        super().__init__(why)
        self.out_of_memory = out_of_memory
        self.lines = lines
        """What it wrote last."""
        self.log = log
        """All it wrote, until the process is closed."""


def wait_for(processes: Sequence[EngineProcess]) -> None:
    """Until one of them has said something, or for a moment."""
    wait([process.link.fileno() for process in processes], POLL_S)


class EngineProcess:
    """One process, from its start to its end."""

    def __init__(self, kind: str, python: str, variables: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-engine-")
        self.log = Path(self._folder.name) / "log"
        ours, theirs = socket.socketpair()
        with self.log.open("wb") as out, theirs:
            self._process = start(
                "trimtab.rollout.external.worker", [kind, theirs.fileno()], fds=[theirs.fileno()], python=[python], out=out,
                env=self._environment(variables), oom_score=KILL_EARLY,
            )  # fmt: skip
        self.link = Channel(ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any, seconds: float = SILENCE_TIMEOUT_S) -> None:
        """Send a message. Raises EngineLost if the process reads nothing for `seconds`."""
        try:
            self.link.send(message, seconds)
        except TimeoutError as error:
            raise self._lost(f"its process has not read for {seconds:.0f} s") from error
        except OSError as error:
            raise self._lost(self._ending()) from error

    def receive(self, seconds: float) -> Any:
        """The next message; EngineLost where none comes."""
        deadline = time.monotonic() + seconds
        while (message := self.take()) is None:
            if time.monotonic() > deadline:
                raise self.silent(seconds)
            wait_for([self])
        return message

    def take(self) -> Any:
        """A message that is there, or None; EngineLost where none will come."""
        if not self.link.ready():
            if self._process.poll() is not None and not self.link.ready():
                raise self._lost(self._ending())
            return None
        try:
            message = self.link.receive()
        except (EOFError, OSError) as error:
            raise self._lost(self._ending()) from error
        if isinstance(message, Failed):
            raise self._lost(message.text, message.out_of_memory)
        return message

    def silent(self, seconds: float) -> EngineLost:
        return self._lost(f"its process has not answered for {seconds:.0f} s")

    def _lost(self, why: str, out_of_memory: bool = False) -> EngineLost:
        return EngineLost(why, out_of_memory, self.last_lines(), self.log)

    def last_lines(self) -> str:
        """What it wrote last."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line[:400] for line in lines[-LAST_LINES:])

    def close(self) -> None:
        """No process is left, nor anything that it started, and no file."""
        self.link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        kill_all(self._process)
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

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        return "its process closed the connection" if code is None else f"its process ended: {how_it_ended(code)}"
