"""The actor of a rank on a Ray cluster: it starts the rank's process on its node, with guardians, and hands messages on.

    driver ── Ray ── actor ── guardian ── guardian ── rank       (the right-hand part is that of a local rank)

The rank is a process of its own, not the actor: it can hang, run out of memory or be killed, and the actor says how it ended; it
keeps its own signals, threads and log. Messages pass as bytes. An actor that is killed takes its rank with it (guardian.py), and
one that the driver has not asked for a while, because its host is cut off, ends both.

Imports no torch: an actor is small.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from trimtab.workers.messages import Channel
from trimtab.workers.process import package_environment
from trimtab.workers.program import ProcessLost, ProgramProcess, wait_for

BEAT_S = 1.0
"""An actor answers at least so often."""
DRIVER_SILENT_S = 60.0
"""A driver that has asked nothing for so long is gone, or cannot reach this host."""
SHARED, SHARED_S = "shared", 3.0
"""Stands for the run folder, and how long a file may take to be seen."""
GROUPS = {"send": 1, "take": 1, "control": 2}
"""Threads of an actor: what is sent, what is taken, and the rest do not wait for each other."""


@dataclass(frozen=True)
class Where:
    """What an actor says of itself."""

    node: str
    """Ray's name of the node."""
    host: str
    address: str
    gpus: tuple[str, ...]

    @property
    def order(self) -> tuple[tuple[int, ...], str, tuple[tuple[int, str], ...]]:
        """Ranks of a host are neighbours, in the order of its devices."""
        parts = tuple(int(part) if part.isdigit() else 0 for part in self.address.split("."))
        return parts, self.node, tuple((int(gpu) if gpu.isdigit() else 0, gpu) for gpu in self.gpus)

    def __str__(self) -> str:
        return self.host if self.host == self.address else f"{self.host} ({self.address})"


class _BytesChannel(Channel):
    """Messages are not this process's to read."""

    def dumps(self, message: bytes) -> bytes:
        return message

    def loads(self, data: bytes) -> bytes:
        return data


class _Process(ProgramProcess):
    channel_type = _BytesChannel


class RankHost:
    """See above. One a device."""

    def __init__(self) -> None:
        self._process: _Process | None = None
        self._started, self._failed = threading.Event(), ""
        self._asked = time.monotonic()
        self._sent = 0
        self._early: dict[int, bytes] = {}
        threading.Thread(target=self._end_without_driver, daemon=True).start()

    @ray.method(concurrency_group="control")
    def where(self) -> Where:
        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Where(context.get_node_id(), socket.gethostname(), ray.util.get_node_ip_address(), gpus)

    @ray.method(concurrency_group="control")
    def missing(self, paths: dict[str, str], mark: str) -> list[str]:
        """The names of those paths that are not on this node; SHARED where it does not see a file that the driver has just
        written, with its own name in it."""
        found = [key for key, path in paths.items() if not os.path.exists(path)]
        file, deadline = Path(mark), time.monotonic() + SHARED_S
        while not (seen := file.is_file() and file.read_text() == file.name) and time.monotonic() < deadline:
            time.sleep(0.1)  # a network's file system may be late
        return found if seen else [*found, SHARED]

    @ray.method(concurrency_group="control")
    def start(self, module: str, log: Path, variables: dict[str, str], folder: str, python: list[str] | None) -> None:
        """Start the rank's process. `folder`: the driver's, where there is one here too, for paths are relative to it."""
        own = {} if "GLOO_SOCKET_IFNAME" in os.environ else interface_of(ray.util.get_node_ip_address())
        environment = package_environment() | own | variables
        try:
            if os.path.isdir(folder):
                os.chdir(folder)
            self._process = _Process(module, [], log, environment, python or [sys.executable, "-u", "-P"])
        except OSError as error:
            self._failed = f"its process cannot be started: {error}"
        self._started.set()

    @ray.method(concurrency_group="send")
    def send(self, number: int, data: bytes) -> None:
        """Hand a message on. Ray may deliver messages in another order than that of their numbers."""
        self._early[number] = data
        self._started.wait()
        while (found := self._early.pop(self._sent, None)) is not None:
            self._sent += 1
            if self._failed:
                return
            try:
                self._running.send(found, DRIVER_SILENT_S)
            except ProcessLost:
                return  # `take` says so

    @ray.method(concurrency_group="take")
    def take(self) -> tuple[list[bytes], str | None]:
        """What the rank has said since the last call, after a wait for it of at most a beat; and, at its end, how it ended."""
        self._asked = time.monotonic()
        found: list[bytes] = []
        if self._is_missing():
            return found, self._failed or None
        wait_for([self._running], BEAT_S)
        try:
            while (message := self._running.take()) is not None:
                found.append(message)
        except ProcessLost as lost:
            return found, str(lost)
        return found, None

    @ray.method(concurrency_group="control")
    def ask_for_stacks(self) -> None:
        self._running.ask_for_stacks()

    @ray.method(concurrency_group="control")
    def last_lines(self) -> str:
        return self._running.last_lines()

    @ray.method(concurrency_group="control")
    def close(self, patience_s: float) -> None:
        """No process of the rank is left."""
        if self._process is not None:
            self._process.close(patience_s)

    def _is_missing(self) -> bool:
        """It could not be started, or not yet. Calls may come before `start`."""
        return not self._started.wait(BEAT_S) or self._process is None

    @property
    def _running(self) -> _Process:
        assert self._process is not None
        return self._process

    def _end_without_driver(self) -> None:
        while time.monotonic() - self._asked < DRIVER_SILENT_S:
            time.sleep(BEAT_S)
        print(f"the driver has asked nothing for {DRIVER_SILENT_S:.0f} s: this rank ends", file=sys.stderr, flush=True)
        self.close(0.0)
        os._exit(1)


def interface_of(address: str) -> dict[str, str]:
    """The variable by which gloo binds to the network on which Ray has this node; by the host's name it often finds another."""
    named: dict[str, list[Any]] = psutil.net_if_addrs()
    names = [name for name, found in named.items() if any(each.address == address for each in found)]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
