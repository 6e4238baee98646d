"""Which rank is to blame when ranks are lost: where one dies, others fail in the collective in which they wait for it, and the
driver may hear of them first."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trimtab.cluster.messages import RankFailed
from trimtab.cluster.process import AnyProcess
from trimtab.workers.program import ProcessLost, wait_for

BLAME_S = 2.0
"""How long to look for it."""
SIGNS_OF_A_LOST_PEER = ("by peer", "gloo", "nccl", "broken pipe", "connection refused", "tcpstore")
"""In what a rank says that fails because another is gone."""


def to_blame(processes: Sequence[AnyProcess], lost: int, why: str) -> tuple[int, str]:
    """The number of the rank that was lost first and why, as far as that can be known. `lost`: one that was, and why."""
    deadline = time.monotonic() + BLAME_S
    others = [number for number in range(len(processes)) if number != lost]
    while others and _for_want_of_another(why) and time.monotonic() < deadline:
        wait_for([processes[number] for number in others])
        for number in list(others):
            if (found := _end_of(processes[number])) is not None:
                others.remove(number)
                if not _for_want_of_another(found):
                    return number, found
    return lost, why


def _end_of(process: AnyProcess) -> str | None:
    """Why a process has ended; None where it has not."""
    try:
        while (message := process.take()) is not None:
            if isinstance(message, RankFailed):
                return message.text
    except ProcessLost as lost:
        return str(lost)
    return None


def _for_want_of_another(why: str) -> bool:
    return any(sign in why.lower() for sign in SIGNS_OF_A_LOST_PEER)
