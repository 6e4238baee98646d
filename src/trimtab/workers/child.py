"""What every child process that runs the user's code does: it opens the channel to its trainer and answers one call at a time.

Guarantees:
- What user code prints goes to stderr; it cannot reach the channel. A fork of the process cannot answer for it.
- Awaitables run in one event loop a process, so that sessions and connections live on between calls.
- Nothing here imports torch.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from trimtab.base.streams import outlet
from trimtab.workers.messages import receive, send

_runner: Any = None


def set_up(channel_fd: int, trace_fd: int) -> socket.socket:
    """What such a process does first; returns the channel to its parent."""
    os.dup2(2, 1)
    sys.stdout, sys.stderr = (
        outlet(sys.stdout),
        outlet(sys.stderr),
    )  # a print that nobody reads is no failure of the code
    faulthandler.enable(file=trace_fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=trace_fd, all_threads=False)
    os.set_inheritable(channel_fd, False)
    os.set_inheritable(trace_fd, False)
    channel = socket.socket(fileno=channel_fd)
    os.register_at_fork(after_in_child=channel.close)
    return channel


def serve(channel: socket.socket, respond: Callable[[bytes], Any]) -> None:
    """Answer calls until the trainer closes the channel, which is an EOFError or a broken connection."""
    pid = os.getpid()
    while True:
        answer = pickle.dumps(respond(receive(channel)))
        if os.getpid() != pid:
            os._exit(0)  # a fork inside the user's code came back here: only the original may answer
        send(channel, answer)


def await_(awaitable: Any) -> Any:
    """Run in this process's one event loop."""
    global _runner
    import asyncio

    async def finish() -> Any:
        return await awaitable

    _runner = _runner or asyncio.Runner()
    return _runner.run(finish())
