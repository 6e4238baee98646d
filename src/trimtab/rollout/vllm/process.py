"""A process that runs an engine: started, spoken to, watched and killed.

`receive` never waits for a process that is dead, and not longer than asked for one that is silent. What it wrote is in a file,
the end of which goes into errors.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil

import trimtab
from trimtab.rollout.vllm.messages import Failed
from trimtab.rollout.vllm.worker import KEY

SLICE_S = 0.2
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The trainer's own: memory of expandable segments cannot be given up by vLLM."""
LAST_LINES = 25
STOP_S = 5.0


class EngineLost(Exception):
    """The process died, hangs or gave up."""

    def __init__(self, why: str, short: bool = False) -> None:
        super().__init__(why)
        self.short = short
        """Of memory."""


class EngineProcess:
    """One process, from its start to its end."""

    def __init__(self, python: str, variables: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-engine-")
        address, key = str(Path(self._folder.name) / "link"), secrets.token_bytes(32)
        self.log = Path(self._folder.name) / "log"
        self._listener = Listener(address, "AF_UNIX", authkey=key)
        source = str(Path(trimtab.__file__).parent.parent)
        env = os.environ | variables | {KEY: key.hex()}
        for name in ALLOCATORS:
            if "expandable_segments" in env.get(name, ""):
                del env[name]
        env["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [python, "-m", "trimtab.rollout.vllm.worker", address],
                env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._link: Connection | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self, seconds: float) -> None:
        """Wait for the process to call."""
        deadline = time.monotonic() + seconds
        listener: Any = self._listener
        listener._listener._socket.settimeout(SLICE_S)
        while self._link is None:
            self._look(deadline, "did not start")
            with contextlib.suppress(TimeoutError):
                self._link = self._listener.accept()

    def send(self, message: Any) -> None:
        assert self._link is not None
        try:
            self._link.send(message)
        except OSError as error:
            raise EngineLost(self._ending()) from error

    def receive(self, seconds: float) -> Any:
        """The next message; EngineLost where none comes."""
        assert self._link is not None
        deadline = time.monotonic() + seconds
        while not self._link.poll(SLICE_S):
            self._look(deadline, f"has said nothing for {seconds:.0f} s")
        try:
            message = self._link.recv()
        except (EOFError, OSError) as error:
            raise EngineLost(self._ending()) from error
        if isinstance(message, Failed):
            raise EngineLost(message.text, message.short)
        return message

    def last_lines(self) -> str:
        """What it wrote last."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(line[:400] for line in lines[-LAST_LINES:])

    def close(self) -> None:
        """No process is left, and no file."""
        if self._link is not None:
            self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S if self._link is not None else 0)
        self._kill()
        self._listener.close()
        self._folder.cleanup()

    def _look(self, deadline: float, silent: str) -> None:
        if self._process.poll() is not None and not (self._link is not None and self._link.poll(0)):
            raise EngineLost(self._ending())
        if time.monotonic() > deadline:
            raise EngineLost(f"its process {silent}")

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        if code is None:
            return "its process closed the connection"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _kill(self) -> None:
        """With everything that it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            for process in [*root.children(recursive=True), root]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()
