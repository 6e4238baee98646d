"""The main program of an engine's process: `python -m trimtab.rollout.vllm.worker SOCKET TRAINER`, a descriptor
and a process id.

It serves one trainer. When that is gone it ends; whatever it raises is its last message.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from trimtab.rollout.vllm.messages import Abort, Failed, Generate, Publish, Settled, Setup, Sleep

BEAT_S = 1.0
PARENT_S = 1.0


def serve(link: Connection) -> None:
    """Carry out orders in turn; between them, step."""
    from trimtab.rollout.vllm.core import Core

    setup = link.recv()
    assert isinstance(setup, Setup)
    core = Core(setup)
    link.send(core.ready)
    beaten = time.monotonic()
    while True:
        while link.poll(0 if core.busy else None):
            order = link.recv()
            if isinstance(order, Generate):
                core.begin(order)
            elif isinstance(order, Abort):
                core.abort()
                link.send(Settled())
            elif isinstance(order, Publish):
                core.publish(order)
                link.send(Settled())
            elif isinstance(order, Sleep):
                core.sleep()
                link.send(Settled())
            else:
                raise AssertionError(f"unknown order {order!r}")
        ended = list(core.step())
        if not core.busy or time.monotonic() - beaten > BEAT_S:
            beaten = time.monotonic()
            link.send(core.beat)  # before the last sequence, after which nobody listens
        for done in ended:
            link.send(done)


def end_with_parent(parent: int) -> None:
    """A trainer that was killed cannot tell: its child then has another parent."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    os.set_inheritable(descriptor, False)  # what vLLM starts must not keep it open
    link = Connection(descriptor)
    try:
        serve(link)
    except (EOFError, ConnectionError):
        return  # the trainer has closed its end
    except BaseException as error:
        import torch

        short = isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error).lower()
        traceback.print_exc()
        link.send(Failed("".join(traceback.format_exception_only(error)).strip(), short))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
