"""The driver's end: all ranks of a run, started, told what to do, watched and ended together.

Guarantees: nothing waits for a rank that is dead, nor for one whose work stands still. An order goes to all ranks, and its
answers come back in their order. Where one rank is lost, all are ended: the others may wait for it in a collective. After
`close` no process is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.base.errors import MemoryExhausted, TrainingError
from trimtab.cluster.messages import Beat, Broken, Done, Failed, Item, Order, Raised, Short, Told
from trimtab.cluster.tensors import RankProcess
from trimtab.workers.process import package_environment
from trimtab.workers.program import ProcessLost, wait_for

START_TIMEOUT_S = 1800.0
"""For loading a model."""
MIN_STALL_S = 120.0
"""Work that stands still for less is not called a hang."""
SEND_TIMEOUT_S = 300.0
STACKS_S = 1.0
"""How long ranks may take to write their stacks."""


class RankLost(TrainingError):
    """A rank died or hangs. All ranks have been ended; the run can go on from its newest checkpoint with new ones."""


class ShortOnRank(MemoryError):
    """A rank ran out of memory (model/memory.py:attempt turns this into a Shortage)."""

    def __init__(self, rank: int, short: Short) -> None:
        super().__init__(f"rank {rank}: {short.message}")
        self.rank, self.facts = rank, short.facts


@dataclass
class _Rank:
    number: int
    process: RankProcess
    progress: Any = None
    moved: float = 0.0
    """When its progress last changed."""


class Ranks:
    """All ranks."""

    def __init__(
        self,
        module: str,
        setups: Sequence[Any],
        logs: Path,
        *,
        variables: Sequence[dict[str, str]],
        tell: Callable[[str, str], None] = lambda kind, text: None,
        stall_s: float = MIN_STALL_S,
    ) -> None:
        """Start a rank for each of `setups`. `variables`: of its environment. `tell`: called with what ranks say on their own."""
        self._tell, self._stall_s, self._log_folder = tell, max(MIN_STALL_S, stall_s), logs
        logs.mkdir(parents=True, exist_ok=True)
        self._ranks: list[_Rank] = []
        self.store: object = None
        """Where they meet: kept as long as they are."""
        self.closed = False
        try:
            for number, (setup, own) in enumerate(zip(setups, variables, strict=True)):
                log = logs / f"rank-{number}.log"
                process = RankProcess(module, [], log, package_environment() | own)
                self._ranks.append(_Rank(number, process))
                process.send(setup, SEND_TIMEOUT_S)
        except ProcessLost as lost:
            raise self._end(self._ranks[-1], str(lost)) from lost

    def __len__(self) -> int:
        return len(self._ranks)

    def wait_until_built(self) -> list[Any]:
        """What each rank says of itself once it has built its part."""
        return [value for value, _ in self._answers(list(self._ranks), START_TIMEOUT_S)]

    def ask(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same order for all ranks: what each returned. Raises what a rank raised for the user, and ShortOnRank where one ran
        out of memory, after all have answered."""
        return self.ask_each(method, [args] * len(self), **kwargs)

    def ask_each(self, method: str, args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """An order with arguments of its own for each rank."""
        self._send([(rank, Order(method, own, kwargs)) for rank, own in zip(self._ranks, args, strict=True)])
        found = self._answers(list(self._ranks), self._stall_s)
        for rank, (_, short) in zip(self._ranks, found):
            if short is not None:
                raise ShortOnRank(rank.number, short)
        for rank, (value, _) in zip(self._ranks, found):
            if isinstance(value, Broken):
                raise self._end(rank, "another rank broke off a collective, and none says why")
        return [value for value, _ in found]

    def stream(self, method: str, args: Sequence[tuple[Any, ...] | None]) -> Iterator[tuple[int, Any]]:
        """The same for a method that yields: (rank, value) as they come; the last value of a rank is a Done. Ranks without
        arguments are left out."""
        busy = {rank.number: rank for rank, own in zip(self._ranks, args, strict=True) if own is not None}
        self._send([(rank, Order(method, args[number] or ())) for number, rank in busy.items()])
        short: ShortOnRank | None = None
        while busy:
            for rank, message in self._hear(list(busy.values()), self._stall_s):
                if isinstance(message, Item):
                    yield rank.number, message.value
                    continue
                del busy[rank.number]
                if isinstance(message, Short):
                    short = short or ShortOnRank(rank.number, message)
                elif isinstance(message, Raised):
                    self._drain(busy)
                    raise message.error
                else:
                    yield rank.number, message
        if short is not None:
            raise MemoryExhausted(f"the rollout ran out of memory on {short}")

    def call_one(self, number: int, method: str, *args: Any) -> Any:
        """An order for one rank alone; it must need no other."""
        rank = self._ranks[number]
        self._send([(rank, Order(method, args))])
        ((value, short),) = self._answers([rank], self._stall_s)
        if short is not None:
            raise ShortOnRank(number, short)
        return value

    def say(self, number: int, message: Any) -> None:
        """Something for a rank that is carrying out an order, which reads it there."""
        self._send([(self._ranks[number], message)])

    def close(self) -> None:
        """No rank is left."""
        self.closed = True
        for rank in self._ranks:
            rank.process.link.close()
        for rank in self._ranks:
            rank.process.close()

    def kill(self) -> None:
        """The same, at once: ranks may hang."""
        self.closed = True
        for rank in self._ranks:
            rank.process.close(patience_s=0.0)

    def _send(self, orders: Sequence[tuple[_Rank, Any]]) -> None:
        if self.closed:
            raise RankLost("the ranks of this run have ended")
        for rank, order in orders:
            rank.moved = time.monotonic()
            try:
                rank.process.send(order, SEND_TIMEOUT_S)
            except ProcessLost as lost:
                raise self._end(rank, str(lost)) from lost

    def _answers(self, ranks: list[_Rank], stall_s: float) -> list[tuple[Any, Short | None]]:
        """What each of these answered: a value, or a shortage. An error for the user is raised once all have answered."""
        found: dict[int, tuple[Any, Short | None]] = {}
        error: Exception | None = None
        for rank in ranks:
            rank.moved = time.monotonic()
        waiting = {rank.number: rank for rank in ranks}
        while waiting:
            for rank, message in self._hear(list(waiting.values()), stall_s):
                del waiting[rank.number]
                if isinstance(message, Raised):
                    error = error or message.error
                elif isinstance(message, Short):
                    found[rank.number] = (None, message)
                elif isinstance(message, Broken):
                    found[rank.number] = (message, None)
                else:
                    assert isinstance(message, Done)
                    found[rank.number] = (message.value, None)
                if error is not None and waiting:
                    self._wait_briefly_for(waiting, error)
        if error is not None:
            raise error
        return [found[rank.number] for rank in ranks]

    def _wait_briefly_for(self, waiting: dict[int, _Rank], error: Exception) -> None:
        """One rank has raised an error: the others answer soon, or wait for it in a collective, and are ended."""
        deadline = time.monotonic() + MIN_STALL_S / 4
        while waiting and time.monotonic() < deadline:
            for rank, _ in self._hear(list(waiting.values()), MIN_STALL_S):
                del waiting[rank.number]
        if waiting:
            self.kill()
            waiting.clear()
            raise error

    def _drain(self, busy: dict[int, _Rank]) -> None:
        while busy:
            for rank, message in self._hear(list(busy.values()), self._stall_s):
                if not isinstance(message, Item):
                    del busy[rank.number]

    def _hear(self, ranks: list[_Rank], stall_s: float) -> Iterator[tuple[_Rank, Any]]:
        """Messages of these ranks, after a wait for the first; what they say on their own is passed on."""
        wait_for([rank.process for rank in ranks])
        for rank in ranks:
            while True:
                try:
                    message = rank.process.take()
                except ProcessLost as lost:
                    raise self._end(rank, str(lost)) from lost
                if message is None:
                    break
                if isinstance(message, Failed):
                    raise self._end(rank, message.text)
                if isinstance(message, Told):
                    self._tell(message.kind, message.text)
                elif isinstance(message, Beat):
                    if message.progress != rank.progress:
                        rank.progress, rank.moved = message.progress, time.monotonic()
                else:
                    rank.moved = time.monotonic()
                    yield rank, message
                    if not isinstance(message, Item):
                        break
            if time.monotonic() - rank.moved > stall_s:
                raise self._hangs(ranks, stall_s)

    def _hangs(self, waiting: list[_Rank], stall_s: float) -> RankLost:
        """Every rank writes its stacks into its log before all are ended."""
        for rank in self._ranks:
            rank.process.ask_for_stacks()
        time.sleep(STACKS_S)
        names = ", ".join(str(rank.number) for rank in waiting)
        why = f"no progress for {stall_s:.0f} s (waiting for rank {names}; the stacks of all ranks are in their logs)"
        return self._end(waiting[0], why)

    def _end(self, rank: _Rank, why: str) -> RankLost:
        lines = rank.process.last_lines()
        self.kill()
        log = os.path.relpath(rank.process.log)
        said = f" Last lines of {log}:\n{lines}" if lines else ""
        return RankLost(f"rank {rank.number} is lost: {why.rstrip('.')}.{said}")
