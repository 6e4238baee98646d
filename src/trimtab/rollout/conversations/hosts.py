"""Environments, seen from the trainer: conversations are begun, continued and ended, and answers arrive in a queue.

Guarantees:
- Every call of `reset` and `step` puts exactly one answer into `answers`, a result or a Failure, unless the worker pool breaks.
- A conversation stays in the process that began it. Should that process end, because another conversation hung or crashed there,
  it goes on in another from the copy that was kept after its last turn; where there is no copy it fails, and says so.
- A conversation that has ended is closed in its process, also at the end of the run, unless that hangs.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.base.errors import EnvError
from trimtab.base.spans import log
from trimtab.base.suggestions import near_or_all
from trimtab.config.schema import Environment
from trimtab.rollout.conversations.tools import BUILTINS
from trimtab.rollout.conversations.wire import (
    CLASS,
    TOOL,
    Close,
    EnvironmentSetup,
    Loaded,
    Reset,
    ResetResult,
    Step,
    StepResult,
    UnknownConversation,
)
from trimtab.workers.messages import Failure
from trimtab.workers.places import Found, WorkerPlaces
from trimtab.workers.pool import Reply, WorkerPool, WorkerSpec
from trimtab.workers.process import POLL_S, import_path
from trimtab.workers.user_code import UserCode, locate_object

CLOSE_TIMEOUT_S = 20.0
"""How long the end of a run waits for a conversation to be closed."""
LOST = (
    "lost its state: another conversation hung or crashed in the same process. Give the environment attributes that can be "
    "pickled: such a conversation continues in another process"
)


@dataclass(eq=False)
class ConversationHandle:
    """One conversation's place."""

    key: int
    home: int | None = None
    copy: bytes | None = None


@dataclass(frozen=True)
class EnvironmentReply:
    """What became of one call."""

    tag: Any
    """Given with the call."""
    result: ResetResult | StepResult | Failure
    seconds: float


@dataclass(frozen=True)
class EnvironmentCall:
    """One call of the worker pool."""

    asked: Reset | Step | Close
    timeout_s: float
    reply: Callable[[Reply], None]
    home: int | None = None
    again: bool = False

    def message(self) -> Any:
        return self.asked


@dataclass(frozen=True)
class Answerer:
    """What answers the model, found but not imported."""

    made: UserCode | None
    tools: list[UserCode] = field(default_factory=list)


def locate_environment(settings: Environment, base_dir: Path, objects: Mapping[str, Callable[..., Any]]) -> Answerer:
    """Find what the configuration names."""
    if settings.fn is not None:
        return Answerer(locate_object(settings.fn, base_dir, objects, (), CLASS))
    return Answerer(None, [locate_object(tool, base_dir, objects, BUILTINS, TOOL) for tool in settings.tools])


class Hosts:
    """Worker processes with environments in them. Made when the user's code has loaded in one; an EnvError otherwise."""

    def __init__(
        self,
        settings: Environment,
        templated: bool,
        *,
        workers: int,
        base_dir: Path,
        objects: Mapping[str, Callable[..., Any]] | None = None,
        places: WorkerPlaces | None = None,
    ) -> None:
        found, path = locate_environment(settings, base_dir, objects or {}), import_path(base_dir)
        code = [*([] if found.made is None else [found.made]), *found.tools]

        def boot(at: Found) -> bytes:
            made = None if found.made is None else at.code(found.made)
            tools = [at.code(tool) for tool in found.tools]
            return pickle.dumps(EnvironmentSetup(at.path(path), made, settings.args, tools, templated))

        self.settings = settings
        self.stateful = found.made is not None
        self._pool = WorkerPool(
            WorkerSpec(
                "trimtab.rollout.conversations.worker",
                boot,
                "environment",
                "the environment",
                EnvError,
                [*(each.place for each in code if each.kind == "file"), str(base_dir.resolve())],
            ),
            workers,
            places,
        )
        self.loaded: Loaded = self._pool.loaded
        self._answers: queue.SimpleQueue[EnvironmentReply] = queue.SimpleQueue()
        self._keys = 0
        self._open = 0
        """Calls that are not answered yet."""
        self._closing = 0
        """Conversations that are over and not closed yet."""
        self._changed = threading.Condition()

    def check(self, columns: Iterable[str]) -> None:
        """Raise where `reset` needs a column that the rows do not have."""
        known = set(columns)
        for column in sorted(self.loaded.needs - known):
            raise EnvError(
                f"environment {self.settings.fn}: reset needs the column {column!r}, but not every row has it. "
                f"{near_or_all(column, known)} Besides the columns, reset can take seed"
            )

    def new_handle(self) -> ConversationHandle:
        self._keys += 1
        return ConversationHandle(self._keys)

    def reset(self, tag: Any, handle: ConversationHandle, seed: int, columns: dict[str, Any]) -> None:
        self._call(tag, handle, Reset(handle.key, seed, columns))

    def step(self, tag: Any, handle: ConversationHandle, seed: int, text: str) -> None:
        self._call(tag, handle, Step(handle.key, seed, text))

    def end(self, handle: ConversationHandle) -> None:
        """The conversation is over: close its instance and forget it. Errors of closing are ignored."""
        if handle.home is not None:
            with self._changed:
                self._closing += 1
            self._pool.call(EnvironmentCall(Close(handle.key), self.settings.timeout_s, self._closed, handle.home))
            handle.home = handle.copy = None

    def _closed(self, reply: Reply) -> None:
        with self._changed:
            self._closing -= 1
            self._changed.notify_all()

    def ready(self) -> list[EnvironmentReply]:
        """Answers that are there."""
        found = []
        while not self._answers.empty():
            found.append(self._answers.get())
        self._open -= len(found)
        return found

    def wait(self) -> EnvironmentReply | None:
        """The next answer; None once every call is answered."""
        while self._open:
            try:
                answer = self._answers.get(timeout=POLL_S)
            except queue.Empty:
                self._pool.raise_if_broken()
                continue
            self._open -= 1
            return answer
        return None

    def forget(self) -> None:
        """Drop the calls that are still running: their caller has gone."""
        while self.wait() is not None:
            pass

    def close(self) -> None:
        """End the workers, when they have closed the conversations that are over: what an instance holds outside its process, a
        container say, would be left behind. One that hangs is not waited for longer than `CLOSE_TIMEOUT_S`."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            with self._changed, contextlib.suppress(EnvError, RuntimeError):
                while self._closing and time.monotonic() < deadline:
                    self._pool.raise_if_broken()
                    if self._changed.wait(POLL_S):
                        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        finally:
            self._pool.close()

    def _call(self, tag: Any, handle: ConversationHandle, asked: Reset | Step) -> None:
        self._open += 1
        self._send(tag, handle, asked)

    def _send(self, tag: Any, handle: ConversationHandle, asked: Reset | Step) -> None:
        receive = partial(self._receive, tag, handle, asked)
        self._pool.call(EnvironmentCall(asked, self.settings.timeout_s, receive, handle.home))

    def _receive(self, tag: Any, handle: ConversationHandle, asked: Reset | Step, reply: Reply) -> None:
        result, now = reply.result, time.perf_counter()
        name, failed = "reset" if isinstance(asked, Reset) else "step", isinstance(result, Failure)
        log.add("environments", name, now - reply.seconds, now, **({"failed": True} if failed else {}))
        if isinstance(result, UnknownConversation):
            assert isinstance(asked, Step)
            if handle.copy is not None:
                copy, handle.home = handle.copy, None
                self._send(tag, handle, replace(asked, state=copy))
                return
            result = Failure("crashed", LOST)
        if isinstance(result, ResetResult | StepResult):
            handle.home, handle.copy = (reply.worker if self.stateful else None), result.state
        else:
            handle.home = None
        self._answers.put(EnvironmentReply(tag, result, reply.seconds))
