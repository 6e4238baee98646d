"""The rank's end: carries out the driver's orders, one at a time, until the driver closes the channel.

Memory that runs out is an answer, not the end: `attempt` has let go of the failed work when the driver is told. An error that is
meant for the user is an answer too. Anything else is the rank's last message. A second thread says every second that the rank is
alive and how far its work is, so that the driver can tell a long order from one that hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trimtab.base.errors import TrimtabError, cut
from trimtab.base.spans import log
from trimtab.cluster.mesh import GroupBroken
from trimtab.cluster.messages import Answer, Broken, Heartbeat, Item, Order, Raised, RankFailed, Short, Told
from trimtab.cluster.tensors import TensorChannel
from trimtab.model.memory import Shortage, attempt
from trimtab.workers.messages import Channel

HEARTBEAT_S = 1.0
SEND_TIMEOUT_S = 600.0
"""A driver that reads nothing for so long is gone or hangs."""


class Link:
    """The channel to the driver, for the two threads of a rank."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._lock = channel, threading.Lock()
        self.order = 0
        """The number of the order that is being carried out."""
        self.progress: Callable[[], Any] = lambda: None
        """How far the work is; may be called from another thread."""

    def send(self, message: Any) -> None:
        with self._lock:
            self._channel.send(message, SEND_TIMEOUT_S)

    def receive(self) -> Any:
        return self._channel.receive()

    def waiting(self) -> bool:
        """The driver has said something that is not yet read."""
        return self._channel.ready()

    def give(self, value: Any) -> None:
        """Send a value of the order that is being carried out, before its answer."""
        self.send(Item(value, self.order))

    def tell(self, kind: str, text: str) -> None:
        self.send(Told(kind, text))

    def beat_forever(self, stop: threading.Event) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            while not stop.wait(HEARTBEAT_S):
                self.send(Heartbeat(self.progress(), log.progress))


class Orders:
    """What a rank has built: each public method of a subclass is an order."""

    @property
    def parted(self) -> bool:
        """It has left the group of all ranks, and has to meet them again."""
        return False

    def ready(self) -> Any:
        """What the driver is told once all is built."""
        return None

    def around(self, method: str) -> AbstractContextManager[None]:
        """Entered while an order is carried out."""
        return nullcontext()

    def facts_of_shortage(self) -> Any:
        """Where the work was that ran out of memory."""
        return None


def carry_out(link: Link, target: Orders, order: Order) -> Any:
    """The answer to an order."""
    link.order = order.number
    log.progress = None

    def call() -> Any:
        with target.around(order.method):
            found = getattr(target, order.method)(*order.args, **order.kwargs)
            if not inspect.isgenerator(found):
                return found
            for value in found:
                link.give(value)
            return None

    try:
        outcome = attempt(call)
    except TrimtabError as error:
        return Raised(error, order.number)
    except GroupBroken:
        return Broken(order.number)
    if isinstance(outcome, Shortage):
        return Short(outcome.message, target.facts_of_shortage(), order.number, target.parted)
    return Answer(outcome, order.number)


def serve(descriptor: str, build: Callable[[Any, Link], Orders]) -> None:
    """The main program of a rank. The driver's first message is what `build` makes the target of all orders from."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.set_inheritable(int(descriptor), False)
    link = Link(TensorChannel(socket.socket(fileno=int(descriptor))))
    stop = threading.Event()
    beats = threading.Thread(target=link.beat_forever, args=(stop,), daemon=True)
    try:
        setup = link.receive()
        beats.start()
        try:
            target = build(setup, link)
        except TrimtabError as error:
            link.send(Raised(error))
            return
        link.send(Answer(target.ready()))
        while True:
            order = link.receive()
            assert isinstance(order, Order)
            answer = carry_out(link, target, order)
            link.send(answer)
    except (EOFError, ConnectionError, TimeoutError):
        return  # the driver has closed its end
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            link.send(RankFailed(cut("".join(traceback.format_exception_only(error)).strip())))
        os._exit(1)  # another rank may hold this one in a collective
    finally:
        stop.set()
