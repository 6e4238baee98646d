"""Worker processes of rewards and environments on all hosts of a Ray cluster.

A worker is the same process as on one machine (workers/process.py), started by an actor on its host, which hands messages on.
Where a host does not have the user's code as the driver's machine has it, under the same paths, the code is shipped: the Python
files of its folders, of the current one and of those of the import path that belong to no installation, at most MOST_BYTES. A
worker whose host is lost is replaced on another; its call has failed, as that of any worker that crashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trimtab.base.errors import TrainingError
from trimtab.workers.messages import Failure
from trimtab.workers.places import HERE, AnyWorker, Found
from trimtab.workers.process import POLL_S, Stopped, Worker

MOST_BYTES = 20 << 20
"""Of Python files that are shipped."""
SKIPPED = frozenset((".git", ".venv", "venv", "node_modules", "__pycache__", "site-packages", "checkpoints", "wandb"))
START_S = 60.0
"""For Ray to start an actor."""
LATE_S = 15.0
"""How much later than a call's own deadline its answer may come before its host is given up."""


class WorkerHost:
    """The actor: one worker, on the host where it is."""

    def __init__(self, module: str) -> None:
        self._worker = Worker(threading.Event(), module)

    def has(self, digests: Mapping[str, str]) -> tuple[list[str], bool]:
        """This host's import path, and whether it has all these files as the driver's machine has them."""
        return list(sys.path), all(digest_of(file) == digest for file, digest in digests.items())

    def unpack(self, files: Mapping[str, bytes]) -> str:
        """Write files below a new folder, by their absolute paths."""
        root = Path(tempfile.mkdtemp(prefix="trimtab-code-"))
        for name, data in files.items():
            file = root / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return str(root)

    def ask(self, message: bytes, timeout_s: float) -> Any:
        return self._worker.ask(message, timeout_s)

    def healthy(self) -> bool:
        return self._worker.healthy()


class RayWorker:
    """See workers/places.py."""

    def __init__(self, actor: Any, host: str, stop: threading.Event) -> None:
        self._actor, self._host, self._stop = actor, host, stop

    def ask(self, message: bytes, timeout_s: float) -> Any:
        try:
            return self.wait(self._actor.ask.remote(message, timeout_s), timeout_s + LATE_S)
        except (GetTimeoutError, RayError):
            return Failure("crashed", f"ended its process: its host {self._host} is gone or does not answer")

    def healthy(self) -> bool:
        with contextlib.suppress(RayError, GetTimeoutError):
            return bool(self.wait(self._actor.healthy.remote(), LATE_S))
        return False

    def kill(self) -> None:
        """Its process ends with the actor (workers/guardian.py)."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def wait(self, answer: Any, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not ray.wait([answer], timeout=POLL_S)[0]:
            if self._stop.is_set():
                raise Stopped
            if time.monotonic() > deadline:
                raise GetTimeoutError
        return ray.get(answer)


class ClusterPlaces:
    """Hosts in turn. Workers on the driver's own are local ones."""

    def __init__(self, nodes: Sequence[tuple[str, str]]) -> None:
        """`nodes`: Ray's name of each, and its host's for people."""
        self._driver = ray.get_runtime_context().get_node_id()
        self._nodes = sorted(nodes, key=lambda node: node[0] != self._driver)  # the driver's is the first
        self.count = len(nodes)
        self._known: dict[tuple[str, ...], dict[str, bytes]] = {}
        """Python files by the folders that they are in: read once."""
        self._reading = threading.Lock()

    def start(
        self, number: int, stop: threading.Event, module: str, files: Sequence[str], again: bool
    ) -> tuple[AnyWorker, Found, str]:
        node, host = self._nodes[number % self.count]
        if node == self._driver:
            return Worker(stop, module), HERE, ""
        folders, shipped = self._code(files)
        strategy = NodeAffinitySchedulingStrategy(node, soft=again)
        try:
            actor = ray.remote(WorkerHost).options(num_cpus=0, scheduling_strategy=strategy).remote(module)
            worker = RayWorker(actor, host, stop)
            path, has = worker.wait(actor.has.remote({file: digest_of(file) for file in shipped}), START_S)
            root = None if has else worker.wait(actor.unpack.remote(shipped), START_S)
        except (RayError, GetTimeoutError) as error:
            raise TrainingError(f"Ray cannot start a worker on node {host}: {type(error).__name__}") from error
        return worker, _found(path, root, folders), f" (on node {host})"

    def _code(self, files: Sequence[str]) -> tuple[list[str], dict[str, bytes]]:
        """Folders with code of the user's, and the Python files in them."""
        named = [file if os.path.isdir(file) else str(Path(file).parent) for file in files]
        folders = list(dict.fromkeys([*named, *user_folders()]))
        with self._reading:
            key = tuple(folders)
            if key not in self._known:
                self._known[key] = python_files(folders)
            return folders, self._known[key]


def user_folders() -> list[str]:
    """The current folder, and those of this process's import path that belong to no installation."""
    installed = [Path(place).resolve() for place in (sys.prefix, sys.base_prefix, Path(__file__).parents[2])]
    found = [Path(entry or os.getcwd()).resolve() for entry in ["", *sys.path]]
    own = [folder for folder in found if folder.is_dir() and not any(folder.is_relative_to(i) for i in installed)]
    return list(dict.fromkeys(map(str, own)))


def _found(path: list[str], root: str | None, folders: list[str]) -> Found:
    """`path`: the host's own import path, to which the user's folders are added. `root`: below which files were unpacked."""

    def moved(name: str) -> str:
        return name if root is None else f"{root}/{name.lstrip('/')}"

    def import_path(entries: list[str]) -> list[str]:
        wanted = dict.fromkeys(entry for entry in map(os.path.realpath, entries) if entry in folders)
        return path + [moved(entry) for entry in wanted if moved(entry) not in path]

    return Found(import_path, moved)


def python_files(folders: Iterable[str]) -> dict[str, bytes]:
    """Python files in these folders and below, by absolute path: as far as there is room, those nearest the top first."""
    found: dict[str, bytes] = {}
    room = MOST_BYTES
    for folder in folders:
        for at, below, names in os.walk(folder):
            below[:] = sorted(name for name in below if name not in SKIPPED and not name.startswith("."))
            for name in sorted(names):
                file = os.path.join(at, name)
                if not name.endswith(".py") or file in found:
                    continue
                with contextlib.suppress(OSError):
                    data = Path(file).read_bytes()
                    if len(data) <= room:
                        found[file] = data
                        room -= len(data)
    return found


def digest_of(file: str) -> str:
    """Empty where there is no such file."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return ""
