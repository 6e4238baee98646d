"""A program of ours in a process of its own (an engine, a rank): started, spoken to, watched and killed.

Nothing ever waits for a process that is dead, and not longer than asked for one that is silent. What it wrote is in a file,
the end of which goes into errors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from trimtab.workers.messages import Channel
from trimtab.workers.spawn import KILL_EARLY, PYTHON, how_it_ended, kill_all, start

POLL_S = 0.2
LAST_LINES = 25
STOP_TIMEOUT_S = 5.0


class ProcessLost(Exception):
    """The process died, hangs or gave up."""

    def __init__(self, why: str, out_of_memory: bool = False, lines: str = "", log: Path | None = None) -> None:
        super().__init__(why)
        self.out_of_memory = out_of_memory
        self.lines = lines
        """What it wrote last."""
        self.log = log
        """All it wrote."""


class ProgramProcess:
    """One process, from its start to its end. `module` has a `main` that is called with `arguments` and a descriptor."""

    lost_as: type[ProcessLost] = ProcessLost
    """What is raised when the process is lost."""
    channel_type: type[Channel] = Channel
    place = ""
    """Where it runs, if not on this machine; for messages."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[object],
        log: Path,
        env: Mapping[str, str],
        python: Sequence[str] = PYTHON,
    ) -> None:
        self.log = log
        self._begin_of_log = log.stat().st_size if log.exists() else 0
        ours, theirs = socket.socketpair()
        with self.log.open("ab") as out, theirs:
            self._process = start(
                module, [*arguments, theirs.fileno()], fds=[theirs.fileno()], python=python, out=out, env=env,
                oom_score=KILL_EARLY,
            )  # fmt: skip
        self.link = self.channel_type(ours)

    @property
    def pid(self) -> int:
        """Of its first guardian."""
        return self._process.pid

    def fileno(self) -> int:
        """To wait for several of them."""
        return self.link.fileno()

    def send(self, message: Any, seconds: float) -> None:
        """Send a message; it is lost where nobody reads for so long. A large one has to be read before it is all written."""
        try:
            self.link.send(message, seconds)
        except TimeoutError as error:
            raise self.lost(f"its process has not read for {seconds:.0f} s") from error
        except OSError as error:
            raise self.lost(self._ending()) from error

    def take(self) -> Any:
        """A message that is there, or None; `lost_as` where none will come."""
        if not self.link.ready():
            if self._process.poll() is not None and not self.link.ready():
                raise self.lost(self._ending())
            return None
        try:
            return self.link.receive()
        except (EOFError, OSError) as error:
            raise self.lost(self._ending()) from error

    def ask_for_stacks(self) -> None:
        """Have the process write its stacks into its log; faulthandler answers also where Python code cannot run."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)

    def lost(self, why: str, out_of_memory: bool = False) -> ProcessLost:
        return self.lost_as(why, out_of_memory, self.last_lines(), self.log)

    def last_lines(self) -> str:
        """What it wrote last."""
        lines = self.log.read_bytes()[self._begin_of_log :].decode(errors="replace").splitlines()
        return "\n".join(line[:400] for line in lines[-LAST_LINES:])

    def begin_close(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """It hears that nothing more comes, and ends; `close` waits for that."""
        self.link.close()

    def close(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        """No process is left, nor anything that it started."""
        self.link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        kill_all(self._process)

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        return "its process closed the connection" if code is None else f"its process ended: {how_it_ended(code)}"


class Heard(Protocol):
    """Something that speaks."""

    def fileno(self) -> int: ...


def wait_for(processes: Sequence[Heard], seconds: float = POLL_S) -> None:
    """Until one of them has said something, or for a moment."""
    wait([process.fileno() for process in processes], seconds)
