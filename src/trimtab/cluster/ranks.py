"""The driver's end: all ranks of a run, started, told what to do, watched and ended together.

Guarantees: nothing waits for a rank that is dead, nor for one whose work stands still. An order goes to all ranks, and its
answers come back in their order. Where one rank is lost, all are ended: the others may wait for it in a collective. After
`close` no process is left.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trimtab.base import spans
from trimtab.base.errors import TrainingError
from trimtab.cluster.blame import to_blame
from trimtab.cluster.mesh import TRACE_KEY
from trimtab.cluster.messages import Answer, Broken, Heartbeat, Item, Order, Raised, RankFailed, Short, Told
from trimtab.cluster.process import AnyProcess, StartRank, start_here
from trimtab.workers.program import STOP_TIMEOUT_S, ProcessLost, wait_for

START_TIMEOUT_S = 1800.0
"""For loading a model."""
MIN_STALL_S = 120.0
"""Work that stands still for less is not called a hang."""
DISK_STALL_S = 1800.0
"""The same for orders that wait for a disk, which say nothing of how far they are."""
DISK_ORDERS = ("begin_write", "end_write", "export", "stop_profile")
ERROR_PATIENCE_S = 30.0
"""How long ranks may take to answer after another has raised an error: they may wait for it in a collective."""
START_ERROR_PATIENCE_S = 0.5
"""The same while they are built, when there is nothing to save."""
SEND_TIMEOUT_S = 300.0
STACKS_S = 1.0
"""How long ranks may take to write their stacks."""
TRACES_S = 2.0
"""And what collectives they have begun: they look once a second whether they shall."""


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
    process: AnyProcess
    progress: Any = None
    moved: float = 0.0
    """When its progress last changed."""
    work: tuple[int, int | None, str] | None = None
    """How far its order is, for people."""
    order: int = 0
    """The number of the order that it was given last."""


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
        start: StartRank = start_here,
        on_end: Callable[[], None] = lambda: None,
        name: str = "",
    ) -> None:
        """Start a rank for each of `setups`. `variables`: of its environment. `tell`: called with what ranks say on their own.
        `on_end`: called when none is left. `name`: of this set, where a run has several."""
        self._on_end, self._name = on_end, f"{name} " if name else ""
        self._asking = threading.RLock()
        """Orders for all ranks come from one thread at a time: another waits."""
        self._tell, self._stall_s, self._log_folder = tell, max(MIN_STALL_S, stall_s), logs
        logs.mkdir(parents=True, exist_ok=True)
        self._ranks: list[_Rank] = []
        self.store: object = None
        """Where they meet: kept as long as they are."""
        self.closed = self._built = False
        self._orders = 0
        try:
            for number, own in enumerate(variables):
                log = logs / f"rank-{number}.log"
                self._ranks.append(_Rank(number, start(number, module, log, dict(own))))
            for rank, setup in zip(self._ranks, setups, strict=True):
                rank.process.send(setup, SEND_TIMEOUT_S)
        except ProcessLost as lost:
            raise self._lost(rank, str(lost)) from lost

    def __len__(self) -> int:
        return len(self._ranks)

    def wait_until_built(self) -> list[Any]:
        """What each rank says of itself once it has built its part."""
        found = [value for value, _ in self._answers(list(self._ranks), START_TIMEOUT_S)]
        self._built = True
        return found

    def ask(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """The same order for all ranks: what each returned. Raises what a rank raised for the user, and ShortOnRank where one ran
        out of memory, after all have answered."""
        return self.ask_each(method, [args] * len(self), **kwargs)

    def ask_each(self, method: str, args: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """An order with arguments of its own for each rank."""
        with self._asking:
            self._order([(rank, Order(method, own, kwargs)) for rank, own in zip(self._ranks, args, strict=True)])
            return self._returned(list(self._ranks), self._patience(method))

    def begin(self, method: str, args: Mapping[int, tuple[Any, ...]]) -> None:
        """An order for some ranks, by number, whose messages are then heard one by one."""
        self._order([(self._ranks[number], Order(method, own)) for number, own in args.items()])

    def end(self, numbers: Collection[int]) -> list[Any]:
        """What these ranks returned for an order that was begun; raises as `ask` does."""
        return self._returned([self._ranks[number] for number in numbers], self._stall_s)

    def hear(self, numbers: Collection[int]) -> Iterator[tuple[int, Any]]:
        """Messages of ranks that are carrying out an order, after a wait for the first: Items, then Answer, Short or Raised."""
        for rank, message in self._hear([self._ranks[number] for number in numbers], self._stall_s):
            yield rank.number, message

    def call_one(self, number: int, method: str, *args: Any) -> Any:
        """An order for one rank alone; it must need no other."""
        rank = self._ranks[number]
        self._order([(rank, Order(method, args))])
        ((value, short),) = self._answers([rank], self._patience(method))
        if short is not None:
            raise ShortOnRank(number, short)
        return value

    def say(self, number: int, message: Any) -> None:
        """Something for a rank that is carrying out an order, which reads it there."""
        self._send([(self._ranks[number], message)])

    def close(self) -> None:
        """No rank is left."""
        self._close(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """The same, at once: ranks may hang."""
        self._close(0.0)

    def _close(self, patience_s: float) -> None:
        self.closed = True
        for rank in self._ranks:
            rank.process.begin_close(patience_s)
        for rank in self._ranks:
            rank.process.close(patience_s)
        self._on_end()
        self._remove_empty_logs()

    def _remove_empty_logs(self) -> None:
        """A run that is refused leaves nothing behind."""
        with contextlib.suppress(OSError):
            for log in [] if self._built else [rank.process.log for rank in self._ranks]:
                if log.exists() and not log.stat().st_size:
                    log.unlink()
            if not self._built:
                self._log_folder.rmdir()

    def _patience(self, method: str) -> float:
        return max(self._stall_s, DISK_STALL_S) if method in DISK_ORDERS else self._stall_s

    def _order(self, orders: Sequence[tuple[_Rank, Order]]) -> None:
        self._orders += 1
        for rank, _ in orders:
            rank.order, rank.work = self._orders, None
        self._send([(rank, replace(order, number=self._orders)) for rank, order in orders])

    def _send(self, orders: Sequence[tuple[_Rank, Any]]) -> None:
        if self.closed:
            raise RankLost("the ranks of this run have ended")
        for rank, order in orders:
            rank.moved = time.monotonic()
            try:
                rank.process.send(order, SEND_TIMEOUT_S)
            except ProcessLost as lost:
                raise self._lost(rank, str(lost)) from lost

    def _returned(self, ranks: list[_Rank], stall_s: float) -> list[Any]:
        """What each of these returned. Ranks that have left their group meet again first."""
        found = self._answers(ranks, stall_s)
        shortages = [(rank.number, short) for rank, (_, short) in zip(ranks, found) if short is not None]
        if any(short.parted for _, short in shortages):
            self.ask("rejoin")
        if shortages:
            raise ShortOnRank(*shortages[0])
        for rank, (value, _) in zip(ranks, found):
            if isinstance(value, Broken):
                raise self._end(rank, "another rank broke off a collective, and none says why")
        return [value for value, _ in found]

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
                    assert isinstance(message, Answer)
                    found[rank.number] = (message.value, None)
                if error is not None and waiting:
                    self._wait_briefly_for(waiting, error)
        if error is not None:
            raise error
        return [found[rank.number] for rank in ranks]

    def _wait_briefly_for(self, waiting: dict[int, _Rank], error: Exception) -> None:
        """One rank has raised an error: the others answer soon, or wait for it in a collective, and are ended."""
        deadline = time.monotonic() + (ERROR_PATIENCE_S if self._built else START_ERROR_PATIENCE_S)
        while waiting and not self.closed and time.monotonic() < deadline:
            try:
                for rank, _ in self._hear(list(waiting.values()), ERROR_PATIENCE_S):
                    del waiting[rank.number]
            except RankLost:  # for want of the one that raised
                break
        if waiting:
            self.kill()
            waiting.clear()
            raise error

    def _hear(self, ranks: list[_Rank], stall_s: float) -> Iterator[tuple[_Rank, Any]]:
        """Messages of these ranks, after a wait for the first; what they say on their own is passed on."""
        wait_for([rank.process for rank in ranks])
        for rank in ranks:
            while True:
                try:
                    message = rank.process.take()
                except ProcessLost as lost:
                    raise self._lost(rank, str(lost)) from lost
                if message is None:
                    break
                if isinstance(message, RankFailed):
                    raise self._lost(rank, message.text)
                if isinstance(message, Told):
                    self._tell(message.kind, message.text)
                elif isinstance(message, Heartbeat):
                    if message.progress != rank.progress:
                        rank.progress, rank.moved = message.progress, time.monotonic()
                    rank.work = message.work
                    self._add_up_work()
                elif message.order == rank.order:
                    rank.moved = time.monotonic()
                    yield rank, message
                    if not isinstance(message, Item):
                        break
            if time.monotonic() - rank.moved > stall_s:
                raise self._hangs(ranks, stall_s)

    def _add_up_work(self) -> None:
        """How far all ranks are together, for RUN/now.json. A rank that has nothing to tell leaves it as it is."""
        known = [rank.work for rank in self._ranks if rank.work is not None]
        if known:
            done, total = sum(each[0] for each in known), sum(each[1] or 0 for each in known)
            spans.log.progress = (done, total, known[0][2])

    def _hangs(self, waiting: list[_Rank], stall_s: float) -> RankLost:
        """Every rank writes its stacks into its log before all are ended."""
        for rank in self._ranks:
            rank.process.ask_for_stacks()
        if isinstance(self.store, dist.Store):
            self.store.set(TRACE_KEY, "1")
            time.sleep(TRACES_S)
        time.sleep(STACKS_S)
        names = ", ".join(str(rank.number) for rank in waiting)
        why = (
            f"no progress for {stall_s:.0f} s (waiting for rank {names}; the stacks of all ranks are in their logs, "
            "what they exchanged in the .json files beside them)"
        )
        return self._end(waiting[0], why)

    def _lost(self, rank: _Rank, why: str) -> RankLost:
        """A rank has ended. If it did because another one had, that is the one to name."""
        number, why = to_blame([other.process for other in self._ranks], rank.number, why)
        return self._end(self._ranks[number], why)

    def _end(self, rank: _Rank, why: str) -> RankLost:
        lines = rank.process.last_lines()
        self.kill()
        log = os.path.relpath(rank.process.log)
        said = f" Last lines of {log}:\n{lines}" if lines else ""
        return RankLost(f"{self._name}rank {rank.number}{rank.process.place} is lost: {why.rstrip('.')}.{said}")
