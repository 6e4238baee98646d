"""How the trainer and its child processes (rewards, judges, environments, engines) talk: length-prefixed pickles over a socket of
their own. And what those that run rewards say.

Importable without torch and pydantic, because every worker imports it.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Literal, TypeVar

from trimtab.base.errors import cut

T = TypeVar("T")
HEADER = struct.Struct("!Q")

Kind = Literal["timeout", "raised", "crashed", "invalid"]


@dataclass(frozen=True)
class Failure:
    """Why a call, or one sample of it, has no value."""

    kind: Kind
    summary: str
    detail: str = ""
    """A traceback where there is one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", cut(self.summary))
        object.__setattr__(self, "detail", cut(self.detail))

    def __str__(self) -> str:
        return f"{self.summary}\n{self.detail.rstrip()}" if self.detail else self.summary


Cell = float | None | Failure
"""What one part says about one sample: a value, not applicable, or a failure."""


@dataclass
class Tally:
    """What a judge counted: adds up over calls."""

    counts: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    """One for every request that was answered, or given up."""
    wait_s: float = 0.0
    """Time for which a step had nothing left to do but wait for it."""

    def add(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.wait_s += other.wait_s
        self.latencies_s += other.latencies_s


@dataclass(frozen=True)
class WorkerAnswer:
    """What a process with many calls under way says about one of them."""

    call: int
    result: list[Cell] | Failure
    seconds: float
    """The longest that one of its samples took."""
    tally: Tally


OnTimeout = Callable[[], None]
"""Called whenever the socket's timeout passes without progress; ends the wait by raising."""


def send(channel: socket.socket, message: bytes, on_timeout: OnTimeout | None = None) -> None:
    rest = memoryview(HEADER.pack(len(message)) + message)
    while rest:
        rest = rest[_patiently(partial(channel.send, rest), on_timeout) :]


def receive(channel: socket.socket, on_timeout: OnTimeout | None = None) -> bytes:
    """One message; EOFError at the end of the stream."""
    (size,) = HEADER.unpack(_exactly(channel, HEADER.size, on_timeout))
    return _exactly(channel, size, on_timeout)


class Channel:
    """One end of a socket on which objects are sent, for who does other things between two messages."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """To wait for several of them."""
        return self._end.fileno()

    def dumps(self, message: Any) -> bytes:
        return pickle.dumps(message)

    def loads(self, data: bytes) -> Any:
        return pickle.loads(data)

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """A TimeoutError where nothing of it is read for so long. The socket stays as it is: another thread may be receiving."""
        data = self.dumps(message)
        rest = memoryview(HEADER.pack(len(data)) + data)
        while rest:
            try:
                rest = rest[self._end.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                writable = select.poll()
                writable.register(self._end, select.POLLOUT)
                if not writable.poll(None if timeout_s is None else 1000 * timeout_s):
                    raise TimeoutError(f"nothing was read for {timeout_s:g} s") from None

    def ready(self, timeout_s: float | None = 0.0) -> bool:
        """Whether there is something to receive, or the end of the stream; None waits for it."""
        return bool(wait([self._end], timeout_s))

    def receive(self) -> Any:
        """The next message, waited for; EOFError at the end of the stream."""
        return self.loads(receive(self._end))

    def close(self) -> None:
        self._end.close()


def _exactly(channel: socket.socket, size: int, on_timeout: OnTimeout | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = _patiently(partial(channel.recv, min(size - len(data), 1 << 20)), on_timeout)
        if not chunk:
            raise EOFError("the other side closed the channel")
        data += chunk
    return bytes(data)


def _patiently(step: Callable[[], T], on_timeout: OnTimeout | None) -> T:
    while True:
        try:
            return step()
        except TimeoutError:
            if on_timeout is None:
                raise
            on_timeout()
