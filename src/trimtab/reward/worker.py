"""The process that runs reward functions: `main` is called with two descriptors (workers/process.py).

Guarantees, besides those of workers/child.py:
- It loads the functions once, then answers one call at a time, in its main thread.
- What is sent back holds only floats, None and strings: everything a function returns is checked here.
- It ends with everything that it started, also when the trainer is killed (guardian.py).
- Nothing here imports torch; it is imported only where a user's function does.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import numbers
import pickle
import sys
from typing import Any

from trimtab.base.errors import RewardError
from trimtab.reward.load import Function, load
from trimtab.workers.child import await_, serve, set_up
from trimtab.workers.messages import Cell, Failure, receive, send
from trimtab.workers.user_code import one_line_error, user_traceback


def main(channel_fd: str, trace_fd: str) -> None:
    channel = set_up(int(channel_fd), int(trace_fd))
    functions: list[Function] = []
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        send(channel, pickle.dumps(boot(receive(channel), functions)))
        serve(channel, lambda message: respond(message, functions))


def boot(message: bytes, functions: list[Function]) -> list[frozenset[str]] | Failure:
    """Take over the parent's import path and load every part; the answer says which columns each needs."""
    sys.path[:], preload, parts = pickle.loads(message)
    try:
        for module in preload:
            importlib.import_module(module)
        functions += [load(source, args) for source, args in parts]
    except RewardError as error:
        return Failure("raised", str(error))
    except Exception as error:  # a built-in refused the values of its arguments
        return Failure("raised", f"reward.args: {error}")
    return [function.needs for function in functions]


def respond(message: bytes, functions: list[Function]) -> list[Cell] | Failure:
    try:
        part, count, offered = pickle.loads(message)
        result = functions[part](offered)
        if inspect.isawaitable(result):
            result = await_(result)
        return checked(result, count)
    except BaseException as error:  # user code: also SystemExit and KeyboardInterrupt
        return Failure("raised", f"raised {one_line_error(error)}", user_traceback(error))


MAX_REWARD_MAGNITUDE = 3.4e38
"""What float32 holds: advantages are kept in it."""


def checked(result: Any, count: int) -> list[Cell] | Failure:
    """What a function returned, entry by entry; a Failure where it cannot be matched with the samples."""
    if not isinstance(result, (list, tuple)) and hasattr(result, "tolist"):
        result = result.tolist()  # numpy arrays, torch tensors
    if not isinstance(result, (list, tuple)):
        return Failure(
            "invalid", f"returned {type(result).__name__}; return a list with one number or None for each completion"
        )
    if len(result) != count:
        return Failure("invalid", f"returned {len(result)} values for {count} completions; return one for each")
    return [checked_entry(entry) for entry in result]


def checked_entry(entry: Any) -> Cell:
    if not isinstance(entry, numbers.Real) and getattr(entry, "shape", None) == ():
        entry = entry.item()  # a torch or numpy scalar
    if entry is None or isinstance(entry, Failure):
        return entry
    if not isinstance(entry, numbers.Real):
        return Failure(
            "invalid", f"returned {type(entry).__name__} {repr(entry)[:80]} as a reward; return a number or None"
        )
    try:
        value = float(entry)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        return Failure(
            "invalid", f"returned {value} as a reward; return a finite number, or None where it does not apply"
        )
    if abs(value) > MAX_REWARD_MAGNITUDE:
        return Failure("invalid", f"returned {value:g} as a reward; return a number within the range of float32")
    return value
