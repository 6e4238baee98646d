"""The process in which environments live: `main` is called with two descriptors (workers/process.py).

Guarantees, besides those of workers/child.py:
- Each conversation has an instance of its own, which stays here from its reset to its close.
- What is sent back holds only text, numbers and the pickled copy of an instance: whatever user code returns is checked here.
- The `random` module and numpy's are seeded before every call from the conversation and its turn, so that
  what they give depends neither on which worker calls nor on what it called before.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy  # here, for an environment may import it in the middle of a call, when it is too late to seed it

from trimtab.base.errors import EnvError
from trimtab.base.suggestions import near_or_all
from trimtab.rollout.conversations.observation import Refused, checked_observation, checked_opening
from trimtab.rollout.conversations.tools import ToolBox
from trimtab.rollout.conversations.wire import (
    CLASS,
    Close,
    EnvironmentSetup,
    Loaded,
    Reset,
    ResetResult,
    Step,
    StepResult,
    UnknownConversation,
)
from trimtab.workers.child import await_, serve, set_up
from trimtab.workers.messages import Failure, receive, send
from trimtab.workers.user_code import UserCode, import_object, one_line_error, user_traceback

MAX_COPY_BYTES = 1 << 22
"""Bytes of a copy above which none is kept."""


def main(channel_fd: str, trace_fd: str) -> None:
    channel = set_up(int(channel_fd), int(trace_fd))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        setup: EnvironmentSetup = pickle.loads(receive(channel))
        sys.path[:] = setup.path
        try:
            host: EnvironmentHost | ToolHost = (
                ToolHost(setup) if setup.made is None else EnvironmentHost(setup.made, setup.args)
            )
        except EnvError as error:
            send(channel, pickle.dumps(Failure("raised", str(error))))
            return
        send(channel, pickle.dumps(host.loaded))
        serve(channel, lambda message: respond(message, host))


def respond(message: bytes, host: EnvironmentHost | ToolHost) -> Any:
    try:
        return host.serve(pickle.loads(message))
    except Refused as error:
        return Failure("invalid", str(error))
    except BaseException as error:  # user code: also SystemExit and KeyboardInterrupt
        summary = f"raised {one_line_error(error)}"
        return Failure("raised", summary, user_traceback(error))


class ToolHost:
    """Tools have no state: any worker serves any turn."""

    def __init__(self, setup: EnvironmentSetup) -> None:
        self._box = ToolBox.load(setup.tools, setup.templated)
        self.loaded = Loaded(schemas=self._box.schemas)

    def serve(self, call: Any) -> StepResult:
        assert isinstance(call, Step)
        seed_all(call.seed)
        return StepResult(checked_observation(self._box.step(call.text)), b"")


class EnvironmentHost:
    """Instances of the user's class, by conversation."""

    def __init__(self, source: UserCode, args: dict[str, Any]) -> None:
        self._make: Callable[..., Any] = import_object(source, CLASS)
        self._args = args
        self.needs, self._takes = signature(self._make, args, source)
        self.loaded = Loaded(self.needs)
        self._here: dict[int, Any] = {}

    def serve(self, call: Reset | Step | Close) -> ResetResult | StepResult | UnknownConversation | None:
        if isinstance(call, Close):
            self._close(call.key)
            return None
        if isinstance(call, Reset):
            return self._reset(call)
        if call.key not in self._here:
            if call.state is None:
                return UnknownConversation()
            self._here[call.key] = self._thaw(call.state)
        seed_all(call.seed)
        instance = self._here[call.key]
        try:
            said = checked_observation(finished(instance.step(call.text)))
        except BaseException:
            self._drop(call.key)
            raise
        return StepResult(said, None if said.done else self._freeze(instance))

    def _close(self, key: int) -> None:
        instance = self._here.pop(key, None)
        if hasattr(instance, "close"):
            finished(instance.close())

    def _drop(self, key: int) -> None:
        """End a conversation that failed. Only the first failure is reported, not errors of closing it."""
        with contextlib.suppress(Exception):
            self._close(key)

    def _reset(self, call: Reset) -> ResetResult:
        seed_all(call.seed)
        instance = self._make(**self._args)
        offered = {"seed": call.seed, **call.columns}
        if self._takes is not None:
            offered = {name: value for name, value in offered.items() if name in self._takes}
        self._here[call.key] = instance
        try:
            opening = checked_opening(finished(instance.reset(**offered)))
        except BaseException:
            self._drop(call.key)
            raise
        return ResetResult(opening, self._freeze(instance))

    def _freeze(self, instance: Any) -> bytes | None:
        """A copy, or None where there can be none: the instance holds something that lives in this process only."""
        out = io.BytesIO()
        pickler = _Pickler(out)
        pickler.environment = type(instance)
        try:
            pickler.dump(instance)
        except Exception:  # a lock, a socket, a process; whatever an attribute's own __reduce__ raises
            return None
        return out.getvalue() if out.tell() <= MAX_COPY_BYTES else None

    def _thaw(self, state: bytes) -> Any:
        unpickler = _Unpickler(io.BytesIO(state))
        unpickler.environment = self._make
        return unpickler.load()


class _Pickler(cloudpickle.Pickler):
    """The class itself does not travel: every worker has it, and one that came from a notebook would be another class there."""

    environment: Any = None

    def persistent_id(self, obj: Any) -> str | None:
        return "environment" if obj is self.environment else None


class _Unpickler(pickle.Unpickler):
    environment: Any = None

    def persistent_load(self, pid: Any) -> Any:
        return self.environment


def finished(result: Any) -> Any:
    """Methods may be async."""
    return await_(result) if inspect.isawaitable(result) else result


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - the generator that users' code shares


def signature(
    make: Callable[..., Any], args: dict[str, Any], source: UserCode
) -> tuple[frozenset[str], frozenset[str] | None]:
    """Columns that `reset` needs, and those it takes (None: any); what does not fit the protocol is an EnvError."""
    if not inspect.isclass(make):
        raise EnvError(
            f"environment {source} is not a class. Write a class with reset(self, **columns) and step(self, text)"
        )
    kind: Any = make
    for method in ("reset", "step"):
        if not callable(getattr(make, method, None)):
            near = near_or_all(method, [name for name in vars(make) if not name.startswith("_")])
            raise EnvError(
                f"environment {source} has no method {method!r}. {near} Write reset(self, **columns) and step(self, text)"
            )
    try:
        inspect.signature(make).bind(**args)
    except TypeError as error:
        known = list(inspect.signature(make).parameters)
        raise EnvError(
            f"environment.args: {source} does not accept {', '.join(args) or 'no arguments'}: {error}. It accepts: "
            f"{', '.join(known) or 'no arguments'}"
        ) from error
    try:
        inspect.signature(kind.step).bind(None, "text")
    except TypeError as error:
        raise EnvError(
            f"environment {source}: step must accept one argument, the model's text. Write step(self, text)"
        ) from error
    parameters = list(inspect.signature(kind.reset).parameters.values())[1:]
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise EnvError(
            f"environment {source}: Trimtab passes the arguments of reset by name. Remove the / from its parameters"
        )
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needs = frozenset(name for name, p in named.items() if p.default is p.empty and name != "seed")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return needs, None if takes_any else frozenset(named)
