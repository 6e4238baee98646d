"""Ranks on a Ray cluster: Ray reserves their devices, starts an actor on each, and carries messages; torch.distributed moves
tensors between ranks, as on one machine.

Guarantees: ranks are numbered by host and device, whatever the order in which Ray placed them. A rank whose process or actor dies
is lost within a second or two, and one whose host is cut off within SILENT_S, long before Ray gives a node up (about a minute).
When ranks end, so do their actors and the reservation.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trimtab.base.errors import ConfigError, Problem, TrainingError
from trimtab.cluster.ray_host import GROUPS, SHARED, RankHost, Where
from trimtab.cluster.tensors import dumps, loads
from trimtab.workers.program import STOP_TIMEOUT_S, ProcessLost
from trimtab.workers.spawn import KILL_TIMEOUT_S

SILENT_S = 15.0
"""A host that has not answered for so long is cut off: its actors answer every second."""
PLACE_S = 60.0
"""For Ray to reserve devices that are free, and to start actors on them."""
LINES_S = 5.0
"""For an actor to read the end of a log."""
FORWARDED = ("HF_", "HUGGING_FACE_", "NCCL_", "PYTORCH_", "TORCH_", "TRANSFORMERS_", "TRIMTAB_", "VLLM_")
"""Variables of the driver's environment that ranks get, by how they begin."""
RANK_PYTHON: Sequence[str] | None = None
"""The interpreter of ranks; None: that of their node's Ray."""

Kind = Literal["CPU", "GPU"]


class ReservedDevices:
    """Devices that are reserved, with an actor on each, until `close`."""

    def __init__(self, group: PlacementGroup | None, actors: Sequence[Any], where: Sequence[Where]) -> None:
        """Actors by rank, and where they are."""
        self._group, self._actors, self.where = group, actors, where
        self._answers: queue.SimpleQueue[tuple[RayProcess, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def start(self, number: int, module: str, log: Path, variables: dict[str, str]) -> RayProcess:
        """The process of a rank (cluster/process.py:StartRank)."""
        forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        actor = self._actors[number]
        actor.start.remote(module, log.absolute(), forwarded | variables, os.getcwd(), RANK_PYTHON)
        return RayProcess(actor, self.where[number], log, self._answers)

    def refuse_missing(self, paths: dict[str, str], folder: Path) -> None:
        """Raises where a node lacks a file that a rank reads, by the key that names it, or does not share the run folder."""
        problems: dict[Problem, None] = {}
        for where, missing in zip(self.where, self._missing(paths, folder)):
            for key in missing:
                if key == SHARED:
                    what = f"node {where} does not see {folder.absolute()} as this machine does"
                    problems[Problem("observe.dir", what, "Write a folder that all nodes share.")] = None
                else:
                    fix = "Put it there under the same path, or on a folder that all nodes share."
                    problems[Problem(key, f"node {where} has no {paths[key]}", fix)] = None
        if problems:
            raise ConfigError(list(problems))

    def shares(self, folder: Path) -> list[bool]:
        """By rank: whether its node sees the folder as this machine does."""
        return [SHARED not in missing for missing in self._missing({}, folder)]

    def _missing(self, paths: dict[str, str], folder: Path) -> list[list[str]]:
        mark = folder.absolute() / f".seen-{uuid.uuid4().hex}"
        mark.write_text(mark.name)
        try:
            refs = [actor.missing.remote(paths, str(mark)) for actor in self._actors]
            return list(ray.get(refs, timeout=PLACE_S))
        finally:
            mark.unlink()

    def close(self) -> None:
        """Nothing is reserved, and no actor is left."""
        self._answers.put(None)
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._group)
        self._thread.join()

    def _hear(self) -> None:
        """Passes answers of actors on, and asks again: also while the driver does something else."""
        while (found := self._answers.get()) is not None:
            process, answer = found
            process.hear(answer)


class RayProcess:
    """A rank's process on a node (cluster/process.py)."""

    def __init__(
        self, actor: Any, where: Where, log: Path, answers: queue.SimpleQueue[tuple[RayProcess, Future[Any]] | None]
    ) -> None:
        self.log, self.place = log, f" on {where}"
        self._actor, self._where, self._answers = actor, where, answers
        self._said: deque[bytes] = deque()
        self._bell, self._rings = socket.socketpair()
        self._rings.setblocking(False)
        self._bell.setblocking(False)
        self._sent = 0
        self._lost = ""
        """Why nothing more comes."""
        self._closing: Any = None
        self._closed = False
        self._ask()

    def fileno(self) -> int:
        return self._bell.fileno()

    def send(self, message: Any, seconds: float) -> None:
        self._refuse_lost()
        self._actor.send.remote(self._sent, dumps(message))
        self._sent += 1

    def take(self) -> Any:
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        if not self._said:
            self._refuse_lost()
            return None
        message = self._said.popleft()
        if self._said or self._lost:
            self._ring()
        return loads(message)

    def ask_for_stacks(self) -> None:
        self._actor.ask_for_stacks.remote()

    def last_lines(self) -> str:
        if self._is_silent:
            return ""
        with contextlib.suppress(RayError, TimeoutError):
            return str(ray.get(self._actor.last_lines.remote(), timeout=LINES_S))
        return ""

    def begin_close(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        if not self._closed and self._closing is None and not self._is_silent:
            self._closing = self._actor.close.remote(patience_s)

    def close(self, patience_s: float = STOP_TIMEOUT_S) -> None:
        if self._closed:
            return
        self._closed = True
        self.begin_close(patience_s)
        if self._closing is not None:
            with contextlib.suppress(RayError, TimeoutError):
                ray.get(self._closing, timeout=patience_s + 2 * KILL_TIMEOUT_S)
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def hear(self, answer: Future[Any]) -> None:
        """What an actor answered; called from another thread."""
        try:
            messages, ended = answer.result()
        except ActorDiedError as error:
            messages, ended = [], f"its Ray actor died{_reason(error)}"
        except RayError as error:
            messages, ended = [], f"its Ray actor cannot be reached{_reason(error)}"
        self._said.extend(messages)
        if ended is None:
            self._ask()
        else:
            self._lost = ended
        if messages or ended:
            self._ring()

    def _ask(self) -> None:
        self._asked = time.monotonic()
        try:
            answer = self._actor.take.remote().future()
        except RayError as error:
            self._lost = f"its Ray actor cannot be reached{_reason(error)}"
            return
        answer.add_done_callback(lambda done: self._answers.put((self, done)))

    @property
    def _is_silent(self) -> bool:
        return not self._lost and time.monotonic() - self._asked > SILENT_S

    def _refuse_lost(self) -> None:
        why = self._lost
        if not why and self._is_silent:
            why = f"its host {self._where} has not answered for {SILENT_S:.0f} s"
        if why:
            raise ProcessLost(why, log=self.log)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._rings.send(b"!")


def _reason(error: Exception) -> str:
    """What Ray says of it that a user can use: the first of its lines that is a sentence."""
    lines = (line.strip() for line in str(error).splitlines())
    told = next((line for line in lines if "worker" in line.lower() or "node" in line.lower()), "")
    return f": {told[:300]}" if told else ""


def place(count: int, kind: Kind, accelerator: str | None = None) -> ReservedDevices:
    """Reserve so many devices, and start an actor on each. `accelerator`: of which kind GPUs must be, where there are several.
    GPUs are taken from as few hosts as possible; on CPUs ranks are spread."""
    bundle: dict[str, float] = {kind: 1.0}
    if accelerator is not None:
        bundle[accelerator] = 0.001
    group = placement_group([bundle] * count, strategy="PACK" if kind == "GPU" else "SPREAD")
    actors: list[Any] = []
    try:
        if not group.wait(PLACE_S):
            raise TrainingError(f"Ray has not reserved {count} {kind}s within {PLACE_S:.0f} s: {in_use(kind)}.")
        host = ray.remote(concurrency_groups=GROUPS)(RankHost)
        for number in range(count):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            own = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1}
            actors.append(host.options(scheduling_strategy=strategy, **own).remote())
        try:
            where: list[Where] = ray.get([actor.where.remote() for actor in actors], timeout=PLACE_S)
        except RayError as error:
            raise TrainingError(f"Ray cannot start a rank's actor{_reason(error)}.") from error
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)
        raise
    by_rank = sorted(range(count), key=lambda number: where[number].order)
    return ReservedDevices(group, [actors[number] for number in by_rank], [where[number] for number in by_rank])


def in_use(kind: Kind) -> str:
    """How many devices the cluster has, and how many are free."""
    total, free = ray.cluster_resources().get(kind, 0), ray.available_resources().get(kind, 0)
    return f"the cluster has {total:g}, of which {free:g} are free"
