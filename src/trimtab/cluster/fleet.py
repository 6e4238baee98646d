"""The engines of all ranks as one engine.

Requests wait in one queue here (queue.py); ranks draw from it while they generate (feed.py). A token is a function of (seed,
step, prompt, sample, position) and of the weights, so it does not matter which engine draws it: on a CPU to the token, on GPUs up
to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from trimtab.base.errors import EngineError, MemoryExhausted
from trimtab.cluster.feed import End, GiveBack, Leaving, More, Report, Returned
from trimtab.cluster.messages import Item, Raised, Short
from trimtab.cluster.queue import QueuedPiece, RequestQueue, Send, Take
from trimtab.cluster.ranks import Ranks, ShortOnRank
from trimtab.cluster.spread import pays_to_spread
from trimtab.rollout.engine import Request, RolloutStats, refuse_while
from trimtab.rollout.feed import Bounds
from trimtab.rollout.seat import owners
from trimtab.rollout.trajectory import Group, Trajectory


class Fleet:
    """See rollout/engine.py."""

    def __init__(
        self,
        ranks: Ranks,
        description: str,
        rows: int,
        lowered: Sequence[Mapping[str, int]],
        parts: int = 1,
        tokens_per_step: float = 0.0,
        joint: bool = False,
    ) -> None:
        """`rows`: sequences that an engine runs at a time, at most; `lowered`: what is lower on each rank; `parts`: ranks whose
        devices one engine spans (rollout/seat.py); `joint`: they generate together; `tokens_per_step`: see spread.py."""
        self._followers = parts - 1 if joint else 0
        self._tokens_per_step = tokens_per_step
        self._ranks, self._description, self._rows, self._parts = ranks, description, rows, parts
        self._owners = owners(len(ranks), parts)
        self._lowered = [dict(each) for each in lowered]
        self._generating = self._lent = False
        self.stats = RolloutStats()

    @property
    def description(self) -> str:
        if self._parts == 1:
            return f"{self._description}, on each of {len(self._ranks)} devices"
        engines = "one engine" if len(self._owners) == 1 else f"{len(self._owners)} engines"
        return f"{self._description}; {engines} on {len(self._ranks)} devices"

    @property
    def non_torch_bytes(self) -> int:
        """The ranks' meters count it."""
        return 0

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        refuse_while(self._generating, "generate")
        if not requests:
            raise EngineError("generate was called without requests")
        if any(request.sampling != requests[0].sampling for request in requests):
            raise EngineError("the requests of one generate call must share their sampling settings")
        self.stats = RolloutStats()
        self._make_room()
        rows = {rank: self._lowered[rank].get("max_sequences", self._rows) for rank in self._owners}
        spread = pays_to_spread(requests, len(rows), self._tokens_per_step)
        call = _Call(self._ranks, requests, rows, spread, self._followers)
        self._generating = True
        try:
            yield from call.groups()
        finally:
            self._generating = False
            call.end()
        self.stats = side_by_side(list(call.stats.values()))
        for rank, lowered in call.lowered.items():
            self._lowered[rank] = lowered

    def lend(self) -> None:
        self._ranks.ask("lend")
        self._lent = True

    def publish(self, version: int) -> None:
        self._make_room()
        self._ranks.ask("publish", version)

    def _make_room(self) -> None:
        """An engine that wakes up takes memory of several ranks' devices: all have to give it up before."""
        if self._lent and self._parts > 1:
            self._ranks.ask("make_room")
        self._lent = False

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        found = [sizes for sizes in self._ranks.ask("shrink", least_tokens) if sizes is not None]
        self._lowered = self._ranks.ask("lowered")
        return (max(before for before, _ in found), min(after for _, after in found)) if found else None

    @property
    def lowered(self) -> dict[str, int]:
        """The lowest of all ranks."""
        names = {name for each in self._lowered for name in each}
        return {name: min(each[name] for each in self._lowered if name in each) for name in sorted(names)}

    def lower(self, limits: Mapping[str, int], least_tokens: int) -> None:
        self._ranks.ask("lower", dict(limits), least_tokens)
        self._lowered = self._ranks.ask("lowered")

    def close(self) -> None:
        """Ranks end with the run."""


class _Call:
    """One `generate` of a fleet, from the order that begins it to each rank's answer."""

    def __init__(
        self, ranks: Ranks, requests: Sequence[Request], rows: Mapping[int, int], spread: bool, followers: int = 0
    ) -> None:
        """`rows`: by rank that has an engine; `spread`: see queue.py; `followers`: ranks behind each of these that generate with
        it, and hear from it what there is to do."""
        self._ranks, self._requests, self._followers = ranks, requests, followers
        self._owners = list(rows)
        self._queue = RequestQueue([request.samples for request in requests], list(rows.values()), spread)
        self._drawn: list[dict[int, Trajectory]] = [{} for _ in requests]
        self._busy: set[int] = set()
        """Ranks that have not answered."""
        self._ended: set[int] = set()
        """Ranks that have been sent the last message."""
        self._failed: Exception | None = None
        self.stats: dict[int, RolloutStats] = {}
        self.lowered: dict[int, dict[str, int]] = {}

    def groups(self) -> Iterator[Group]:
        """Every request's group once, in the order they become whole."""
        shares = {rank: share for rank, share in zip(self._owners, self._queue.first_shares()) if share}
        bounds = Bounds.of(self._requests)
        self._busy = set(shares)
        begun = {rank: (self._cut(share), bounds) for rank, share in shares.items()}
        self._ranks.begin("generate", begun)
        if self._followers:
            behind = {rank + 1 + i: given for rank, given in begun.items() for i in range(self._followers)}
            self._ranks.begin("follow", behind)
            self._busy |= behind.keys()
        while self._queue.missing and not self._failed:
            for rank, message in self._ranks.hear(self._busy):
                yield from self._take(rank, message)
        self.end()
        if self._failed is not None:
            raise self._failed

    def end(self) -> None:
        """No rank is busy with this call any more, or all have ended."""
        while self._busy and not self._ranks.closed:
            for rank in (self._busy - self._ended).intersection(self._owners):
                self._end_one(rank)
            for rank, message in self._ranks.hear(self._busy):
                for _ in self._take(rank, message):
                    pass

    def _take(self, rank: int, message: object) -> Iterator[Group]:
        value = message.value if isinstance(message, Item) else message
        if isinstance(value, Group):
            yield from self._put(rank, value)
        elif isinstance(value, Report):
            self._act(self._queue.heard(self._owners.index(rank), value.received, value.load))
        elif isinstance(value, Returned):
            self._act(self._queue.returned(self._owners.index(rank), value.cuts, value.received, value.load))
        elif isinstance(value, Leaving):
            if rank not in self._ended:
                self._end_one(rank)
        elif isinstance(value, RolloutStats):
            self.stats[rank] = value
        elif isinstance(value, dict):
            self.lowered[rank] = value
        else:
            self._busy.discard(rank)
            if isinstance(value, Raised):
                self._failed = self._failed or value.error
            elif isinstance(value, Short):
                short = ShortOnRank(rank, value)
                self._failed = self._failed or MemoryExhausted(f"the rollout ran out of memory on {short}")

    def _put(self, rank: int, found: Group) -> Iterator[Group]:
        """Samples of a request have come: its group, if they were the last."""
        engine = self._owners.index(rank)
        piece = self._queue.piece(engine, found.index)
        self._queue.delivered(engine, found.index, len(found.trajectories))
        request, drawn = self._requests[piece.request], self._drawn[piece.request]
        for trajectory in found.trajectories:
            place = piece.first + trajectory.sample
            assert place not in drawn, "a sample was drawn twice"
            drawn[place] = replace(trajectory, prompt=request.prompt, sample=place)
        if len(drawn) == request.samples:
            yield Group(request.prompt, [drawn[place] for place in range(request.samples)], piece.request)

    def _act(self, actions: Sequence[Send | Take]) -> None:
        for action in actions:
            rank = self._owners[action.engine]
            if rank not in self._ended:  # or nobody waits for it any more
                more = More(self._cut(action.pieces)) if isinstance(action, Send) else GiveBack(action.samples)
                self._ranks.say(rank, more)

    def _end_one(self, rank: int) -> None:
        self._ended.add(rank)
        self._ranks.say(rank, End())

    def _cut(self, pieces: Sequence[QueuedPiece]) -> list[Request]:
        """Requests for these samples alone: they have the random numbers that they have in the whole request."""
        found = []
        for piece in pieces:
            request = self._requests[piece.request]
            limits = request.limits[piece.first : piece.first + piece.samples]
            first = request.first_sample + piece.first
            found.append(replace(request, samples=piece.samples, max_new_tokens=limits, first_sample=first))
        return found


def side_by_side(found: Sequence[RolloutStats]) -> RolloutStats:
    """What engines did at the same time: counts add up, and so do slots and pages; seconds are the slowest one's."""
    whole = RolloutStats()
    for stats in found:
        whole.add(stats)
    for name in ("slots", "peak_pages", "total_pages"):
        setattr(whole, name, sum(getattr(stats, name) for stats in found))
    for name in ("prefill_s", "decode_s", "wait_s", "decode_steps"):
        setattr(whole, name, max((getattr(stats, name) for stats in found), default=0))
    whole.tail_s = max((stats.tail_s for stats in found if stats.tail_s is not None), default=None)
    return whole
