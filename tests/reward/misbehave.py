"""Reward functions for the tests. A completion that names a misdeed has it done, any other is a number: its score."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any


def sleep_forever() -> None:
    time.sleep(1000)


def busy_loop() -> None:
    while True:
        pass


def ignore_sigterm() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1000)


CHILDREN = 3


def have_children() -> None:
    """One in the process group, one that left it, one that is a daemon; all outlive their parent unless they are killed."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)", "misbehave", os.environ["TESTED_BY"]]
    for new_session in (False, True):
        subprocess.Popen(command, start_new_session=new_session)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, command)
        os._exit(0)
    os.wait()


def hang_with_children() -> None:
    have_children()
    time.sleep(1000)


def end_with_children() -> None:
    have_children()
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error() -> None:
    raise ValueError("the judge is out")


def raise_at_length() -> None:
    raise ValueError("x" * 20_000_000 + " the end")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raise_without_words() -> None:
    raise Unspeakable


def exit_politely() -> None:
    sys.exit(3)


def exit_at_once() -> None:
    os._exit(7)


def segfault() -> None:
    ctypes.string_at(0)


def killed_by_system() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_and_leave_the_channel_open() -> None:
    """A C library's fork: Python's hooks do not run, so the child keeps the channel."""
    if ctypes.CDLL(None).fork() == 0:
        time.sleep(1000)
    os._exit(1)


HANGS = (sleep_forever, busy_loop, ignore_sigterm, hang_with_children, stop_itself)
ENDS = (
    raise_error,
    raise_at_length,
    raise_without_words,
    exit_politely,
    exit_at_once,
    segfault,
    killed_by_system,
    end_with_children,
    die_and_leave_the_channel_open,
)
MISDEEDS = {function.__name__: function for function in (*HANGS, *ENDS)}
ENTRIES: dict[str, Any] = {"nan": float("nan"), "inf": float("inf"), "string": "1.0", "list": [1.0], "none": None}


def score(completions: list[str]) -> list[Any]:
    for completion in completions:
        if completion in MISDEEDS:
            MISDEEDS[completion]()
    return [ENTRIES[c] if c in ENTRIES else float(c) for c in completions if c != "too_few"]


def length(completions: list[str]) -> list[float]:
    return [float(len(completion)) for completion in completions]


def fork_and_return(completions: list[str], **columns: Any) -> list[float]:
    """The child comes back from the call as well: it must not answer in its parent's place."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return [1.0 if child else -1.0] * len(completions)


def fork_and_stay(completions: list[str], **columns: Any) -> list[float]:
    if os.fork() == 0:
        time.sleep(1000)
    return [1.0] * len(completions)


def leave_children(completions: list[str], **columns: Any) -> list[float]:
    have_children()
    return [1.0] * len(completions)


def noisy(completions: list[str], **columns: Any) -> list[float]:
    print("x" * 100_000, flush=True)
    os.write(1, b"raw bytes\n")
    return [1.0] * len(completions)


async def eventually(completions: list[str], **columns: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(c) for c in completions]


def echo(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
    """Fails with everything it was given."""
    raise ValueError(repr((prompts, completions, completion_ids, sorted(columns.items()))))


def gold_only(answer: list[str], scale: float = 1.0) -> list[float]:
    return [float(a) * scale for a in answer]


def even_only(completions: list[str]) -> list[float | None]:
    return [1.0 if float(c) % 2 == 0 else None for c in completions]


def as_array(completions: list[str]) -> Any:
    import numpy as np

    return np.array([float(c) for c in completions], dtype=np.float32)


def as_scalars(completions: list[str]) -> Any:
    import numpy as np

    return tuple(kind(float(c)) for c, kind in zip(completions, (np.float32, np.int64, np.bool_, bool)))


def die_afterwards(completions: list[str]) -> list[float]:
    """Answers, then ends its process between two calls."""
    import threading

    threading.Timer(0.05, lambda: os._exit(1)).start()
    return [1.0] * len(completions)


def modules(completions: list[str]) -> list[float]:
    return [float("torch" in sys.modules or "pydantic" in sys.modules)] * len(completions)


def threads(completions: list[str]) -> list[float]:
    return [float(os.environ["OMP_NUM_THREADS"])] * len(completions)


not_a_function = {"a": 1}


def one_for_all(completions: list[str], **_: Any) -> list[float]:
    return [1.0]
