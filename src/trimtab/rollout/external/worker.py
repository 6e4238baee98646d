"""The main program of an engine's process: `main` is called with the name of a library and a descriptor (process.py).

It serves one trainer. When that is gone it ends (guardian.py); whatever it raises is its last message.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
import traceback
from collections.abc import Iterable
from typing import Protocol

from trimtab.base.errors import cut
from trimtab.model.memory import is_out_of_memory
from trimtab.rollout.external.account import Account
from trimtab.rollout.external.ipc import NotShared
from trimtab.rollout.external.messages import (
    Abort,
    Done,
    EngineSetup,
    Failed,
    Generate,
    Publish,
    Settled,
    Sleep,
    Unread,
)
from trimtab.workers.messages import Channel

HEARTBEAT_S = 1.0


class Core(Protocol):
    """An engine inside its process; one for each kind, in `trimtab.rollout.external.KIND.core`."""

    account: Account

    @property
    def busy(self) -> bool:
        """Something is unfinished."""

    def publish(self, order: Publish) -> None:
        """Raises `NotShared` where the weights cannot be seen, and then nothing has changed."""

    def sleep(self) -> None: ...

    def begin(self, order: Generate) -> None: ...

    def step(self) -> Iterable[Done]:
        """Go on a little; what ended with it."""

    def abort(self) -> None: ...


def core_module(kind: str) -> str:
    """The module that holds the engine's core: a string, since only the engine's own environment can import it."""
    return f"trimtab.rollout.external.{kind}.core"


def core_class(kind: str) -> str:
    """The name of the core's class there: VllmCore, SglangCore."""
    return f"{kind.capitalize()}Core"


def serve(kind: str, link: Channel) -> None:
    """Carry out orders in turn; between them, step."""
    setup = link.receive()
    assert isinstance(setup, EngineSetup)
    core: Core = getattr(importlib.import_module(core_module(kind)), core_class(kind))(setup)
    link.send(core.account.ready)
    beaten = time.monotonic()
    while True:
        while link.ready(0.0 if core.busy else None):
            order = link.receive()
            if isinstance(order, Generate):
                core.begin(order)
            elif isinstance(order, Abort):
                core.abort()
                link.send(Settled())
            elif isinstance(order, Publish):
                try:
                    core.publish(order)
                    link.send(Settled())
                except NotShared as error:
                    link.send(Unread(str(error)))
            elif isinstance(order, Sleep):
                core.sleep()
                link.send(Settled())
            else:
                raise AssertionError(f"unknown order {order!r}")
        ended = list(core.step())
        if not core.busy or time.monotonic() - beaten > HEARTBEAT_S:
            beaten = time.monotonic()
            link.send(core.account.beat)  # before the last sequence, after which nobody listens
        for done in ended:
            link.send(done)


def main(kind: str, descriptor: str) -> None:
    os.set_inheritable(int(descriptor), False)  # what a library starts must not keep it open
    link = Channel(socket.socket(fileno=int(descriptor)))
    try:
        serve(kind, link)
    except (EOFError, ConnectionError):
        return  # the trainer has closed its end
    except BaseException as error:
        out_of_memory = is_out_of_memory(error) or "out of memory" in str(error).lower()  # some errors only say so
        traceback.print_exc()
        link.send(Failed(cut("".join(traceback.format_exception_only(error)).strip()), out_of_memory))
        raise SystemExit(1) from error
