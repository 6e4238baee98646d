"""Which engine draws which samples: one queue for all of them. Pure bookkeeping: no processes, no tensors.

Every engine begins with about what it can run at once; the rest waits here, and goes group by group to whoever runs low. When
nothing waits any more and an engine has rows free, it gets half of what the fullest cannot start. Nothing that runs is moved: it
would hardly pay (bench/fleet_moves.py).

    queue --Send--> engine --Load--> queue      an engine that runs low is sent the next group
    queue --Take--> fullest --CutRequest--> queue --Send--> one with room

Guarantees, checked by property tests: every sample is drawn exactly once, whatever the engines' speeds and sizes; as long as
samples are missing, some engine has one of them or one is on its way; an engine is asked to give back only what it holds, and by
one request at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab.rollout.feed import CutRequest, Load

SHARE_HELD_AHEAD = 1 / 8
"""Of an engine's rows: so many samples lie ready beside those that run, so that no row waits for the driver."""


@dataclass(frozen=True)
class QueuedPiece:
    """Some of a request's samples, side by side."""

    request: int
    first: int
    """Place of the first among the request's."""
    samples: int

    def cut(self, samples: int) -> tuple[QueuedPiece, QueuedPiece]:
        """The first so many, and the rest."""
        rest = QueuedPiece(self.request, self.first + samples, self.samples - samples)
        return QueuedPiece(self.request, self.first, samples), rest


@dataclass(frozen=True)
class Send:
    """Give an engine more."""

    engine: int
    pieces: list[QueuedPiece]


@dataclass(frozen=True)
class Take:
    """Ask an engine for some of what it has not started."""

    engine: int
    samples: int


@dataclass(eq=False)
class _Engine:
    rows: int
    pieces: list[QueuedPiece] = field(default_factory=list)
    """In the order they were sent."""
    missing: dict[int, int] = field(default_factory=dict)
    """Samples that have not come, by number of the piece."""
    sent: int = 0
    """Samples so far."""
    load: Load = field(init=False)
    received: int = 0
    """Samples that had arrived when it said so."""
    asked_for: int | None = None
    """Who gets what it was asked to give back."""
    keeps: bool = False
    """It gave nothing back, and has got nothing since."""

    def __post_init__(self) -> None:
        self.load = Load(0, 0, self.rows)

    @property
    def ahead(self) -> int:
        return max(1, int(self.rows * SHARE_HELD_AHEAD))

    @property
    def unstarted(self) -> int:
        """What it said, and what has been sent since."""
        return self.load.unstarted + self.sent - self.received

    def spares(self, idle: bool) -> int:
        """Samples to take off it for another one: half of those that it has no rows for; for an idle one half of all that it has
        not started. The last one stays, as it may just be starting."""
        if self.keeps:
            return 0
        without_rows = max(0, self.unstarted - self.load.free)
        return max(-(-without_rows // 2), self.unstarted // 2 if idle else 0)


class RequestQueue:
    """The samples of one `generate`, by number of their request and place in it."""

    def __init__(self, samples: Sequence[int], rows: Sequence[int], spread: bool = False) -> None:
        """`samples` of each request; `rows`: how many each engine runs at a time; `spread`: what can run at once is dealt out so
        that each engine has samples of every request (spread.py)."""
        self._spread = spread
        self._waiting = deque(QueuedPiece(request, 0, count) for request, count in enumerate(samples))
        self._engines = [_Engine(count) for count in rows]
        self.missing = sum(samples)
        """Samples that no engine has delivered."""

    def first_shares(self) -> list[list[QueuedPiece]]:
        """What each engine begins with; none has nothing, unless there are fewer samples than engines. Where all samples can
        run at once they are shared out evenly, and groups are cut for that; else whole groups, as far as they go."""
        total, rows = self.missing, sum(engine.rows for engine in self._engines)
        if self._spread and total <= rows and self._deal_out():
            return [list(engine.pieces) for engine in self._engines]
        begin = before = 0
        for engine in self._engines:
            before += engine.rows
            end = total * before // rows
            fits, share = total <= rows, end - begin
            begin = end
            budget = share if fits else min(share, engine.rows + engine.ahead)
            taken = 0
            while self._waiting and taken < budget:
                piece = self._waiting[0]
                if taken + piece.samples > budget and taken and not fits:
                    break
                taken += self._give(engine, budget - taken).samples
        return [list(engine.pieces) for engine in self._engines]

    def _deal_out(self) -> bool:
        """Give each engine some of every request, in proportion to its rows; False, and nothing is given, where one would have
        nothing."""
        rows, dealt = sum(engine.rows for engine in self._engines), 0
        given = [0] * len(self._engines)
        plan: list[tuple[int, QueuedPiece]] = []
        for piece in self._waiting:
            before, rest = list(given), piece
            for _ in range(piece.samples):
                dealt += 1
                lacks = [dealt * engine.rows / rows - has for engine, has in zip(self._engines, given)]
                given[lacks.index(max(lacks))] += 1
            for number, samples in enumerate(now - then for now, then in zip(given, before)):
                if samples:
                    part, rest = rest.cut(samples)
                    plan.append((number, part))
        if not all(given):
            return False
        for number, part in plan:
            self._hand(self._engines[number], [part])
        self._waiting.clear()
        return True

    def piece(self, engine: int, index: int) -> QueuedPiece:
        """What an engine knows by a number, as it was sent."""
        return self._engines[engine].pieces[index]

    def heard(self, engine: int, received: int, load: Load) -> list[Send | Take]:
        """What an engine has to do, when it had got so many samples: what to do about it."""
        one = self._engines[engine]
        assert one.sent > received or not load.idle or not any(one.missing.values()), "an engine has lost samples"
        one.received, one.load = received, load
        return self._balance()

    def delivered(self, engine: int, index: int, samples: int) -> None:
        """Samples of a piece have come: all that were not given back."""
        one = self._engines[engine]
        assert one.missing[index] == samples, "a piece came in parts, or twice"
        one.missing[index] = 0
        self.missing -= samples

    def returned(self, engine: int, cuts: Sequence[CutRequest], received: int, load: Load) -> list[Send | Take]:
        """What an engine gave back when it was asked to: what to do with it."""
        one = self._engines[engine]
        thief, one.asked_for = one.asked_for, None
        assert thief is not None, "an engine gave back what it was not asked for"
        one.keeps = not cuts
        pieces = []
        for cut in cuts:
            piece = one.pieces[cut.index]
            kept, back = piece.cut(piece.samples - cut.samples)
            one.pieces[cut.index] = kept
            one.missing[cut.index] -= cut.samples
            pieces.append(back)
        actions: list[Send | Take] = []
        if pieces:
            self._hand(self._engines[thief], pieces)
            actions.append(Send(thief, pieces))
        one.received, one.load = received, load
        return actions + self._balance()

    def _balance(self) -> list[Send | Take]:
        actions: list[Send | Take] = []
        for number, engine in sorted(enumerate(self._engines), key=lambda each: each[1].unstarted):
            pieces = []
            while self._waiting and engine.pieces and engine.unstarted < engine.ahead:
                pieces.append(self._give(engine, engine.rows + engine.ahead))
            if pieces:
                actions.append(Send(number, pieces))
        return actions if self._waiting else actions + self._steal()

    def _steal(self) -> list[Send | Take]:
        """Nothing waits here: engines with room get half of what the fullest have not started."""
        served = {engine.asked_for for engine in self._engines}
        actions: list[Send | Take] = []
        for number, engine in enumerate(self._engines):
            if engine.unstarted or not engine.load.free or not engine.pieces or number in served:
                continue
            holders = [each for each in self._engines if each.asked_for is None and each.spares(engine.load.idle)]
            if holders:
                fullest = max(holders, key=lambda each: each.spares(engine.load.idle))
                fullest.asked_for = number
                samples = min(fullest.spares(engine.load.idle), engine.load.free)
                actions.append(Take(self._engines.index(fullest), samples))
        return actions

    def _give(self, engine: _Engine, most: int) -> QueuedPiece:
        """The next of what waits, cut to at most so many samples."""
        piece = self._waiting.popleft()
        if piece.samples > most:
            piece, rest = piece.cut(most)
            self._waiting.appendleft(rest)
        self._hand(engine, [piece])
        return piece

    def _hand(self, engine: _Engine, pieces: Sequence[QueuedPiece]) -> None:
        for piece in pieces:
            engine.missing[len(engine.pieces)] = piece.samples
            engine.pieces.append(piece)
            engine.sent += piece.samples
            engine.keeps = False
