"""One queue for several engines: every sample is drawn once, nobody waits while another has work that it cannot start."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.cluster.queue import QueuedPiece, RequestQueue, Send, Take
from trimtab.rollout.feed import CutRequest, Load


@dataclass
class Engine:
    """What an engine does, without tokens: starts samples in order as rows allow, gives back the last that it has not started."""

    rows: int
    pieces: list[QueuedPiece] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    received: int = 0
    inbox: deque[Send | Take] = field(default_factory=deque)
    said: tuple[int, Load] | None = None

    @property
    def load(self) -> Load:
        unstarted = sum(piece.samples for piece in self.pieces) - sum(self.started)
        running = sum(self.started) - sum(self.drawn)
        return Load(unstarted, running, self.rows - running)

    def add(self, pieces: list[QueuedPiece]) -> None:
        self.pieces += pieces
        self.started += [0] * len(pieces)
        self.drawn += [0] * len(pieces)
        self.received += sum(piece.samples for piece in pieces)

    def start(self) -> None:
        for number, piece in enumerate(self.pieces):
            self.started[number] += min(self.load.free, piece.samples - self.started[number])

    def give_back(self, samples: int) -> list[CutRequest]:
        cuts = []
        for number in reversed(range(len(self.pieces))):
            piece = self.pieces[number]
            taken = min(samples, piece.samples - self.started[number])
            if taken:
                self.pieces[number] = piece.cut(piece.samples - taken)[0]
                cuts.append(CutRequest(number, taken))
                samples -= taken
        return cuts

    def draw(self, numbers: Random) -> None:
        """One of those that run ends."""
        running = [n for n in range(len(self.pieces)) if self.started[n] > self.drawn[n]]
        if running:
            self.drawn[numbers.choice(running)] += 1


class Simulation:
    """Engines of different speed, messages that take their time."""

    def __init__(self, samples: list[int], rows: list[int], speeds: list[int], seed: int, spread: bool) -> None:
        self.numbers, self.speeds = Random(seed), speeds
        self.queue = RequestQueue(samples, rows, spread)
        self.engines = [Engine(count) for count in rows]
        self.drawn: list[tuple[int, int]] = []
        self.outbox: deque[tuple[int, object]] = deque()
        self.handed_over: set[tuple[int, int]] = set()
        for engine, share in zip(self.engines, self.queue.first_shares()):
            engine.add(share)

    def run(self) -> int:
        """Rounds until all are drawn."""
        active = [n for n, engine in enumerate(self.engines) if engine.pieces]
        for turn in range(5_000):
            if not self.queue.missing:
                return turn
            number = self.numbers.choices(active, [self.speeds[n] for n in active])[0]
            self.round_of(number)
            while self.outbox and self.numbers.random() < 0.7:
                self.deliver()
        raise AssertionError("nothing moves")

    def round_of(self, number: int) -> None:
        engine = self.engines[number]
        while engine.inbox:
            message = engine.inbox.popleft()
            if isinstance(message, Send):
                engine.add(message.pieces)
            else:
                cuts = engine.give_back(message.samples)
                self.outbox.append((number, (cuts, engine.received, engine.load)))
        engine.start()
        engine.draw(self.numbers)
        for index, piece in enumerate(engine.pieces):
            if piece.samples and engine.drawn[index] == piece.samples and (number, index) not in self.handed_over:
                self.handed_over.add((number, index))
                self.outbox.append((number, (index, piece)))
        report = (engine.received, engine.load)
        if report != engine.said:
            engine.said = report
            self.outbox.append((number, report))

    def deliver(self) -> None:
        number, message = self.outbox.popleft()
        match message:
            case (int(index), QueuedPiece() as piece):
                assert self.queue.piece(number, index) == piece
                self.queue.delivered(number, index, piece.samples)
                self.drawn += [(piece.request, piece.first + i) for i in range(piece.samples)]
                actions = []
            case (int(received), Load() as load):
                actions = self.queue.heard(number, received, load)
            case (list(cuts), int(received), Load() as load):
                actions = self.queue.returned(number, cuts, received, load)
        for action in actions:
            self.engines[action.engine].inbox.append(action)


fleets = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=5)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), fleets, st.integers(0, 2**20), st.booleans())
@settings(max_examples=60)
def test_every_sample_is_drawn_exactly_once(
    samples: list[int], fleet: list[tuple[int, int]], seed: int, spread: bool
) -> None:
    simulation = Simulation(samples, [rows for rows, _ in fleet], [speed for _, speed in fleet], seed, spread)
    simulation.run()
    assert sorted(simulation.drawn) == [(r, place) for r, count in enumerate(samples) for place in range(count)]


counts = st.lists(st.integers(1, 20), min_size=1, max_size=12)


@given(counts, st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans())
def test_every_engine_begins_with_something_and_none_with_more_than_it_holds(
    samples: list[int], rows: list[int], spread: bool
) -> None:
    shares = RequestQueue(samples, rows, spread).first_shares()
    sizes = [sum(piece.samples for piece in share) for share in shares]
    if sum(samples) <= sum(rows):
        assert sum(sizes) == sum(samples)
        assert all(size <= count for size, count in zip(sizes, rows))
    else:
        assert all(sizes)
        assert all(size <= count + max(1, count // 8) for size, count in zip(sizes, rows))


def test_what_can_run_at_once_is_shared_out_evenly_and_groups_are_cut_for_it() -> None:
    shares = RequestQueue([16, 16, 16], [32, 32]).first_shares()
    assert shares == [[QueuedPiece(0, 0, 16), QueuedPiece(1, 0, 8)], [QueuedPiece(1, 8, 8), QueuedPiece(2, 0, 16)]]


def test_what_is_spread_lies_on_all_engines_in_proportion_to_their_rows() -> None:
    shares = RequestQueue([16, 16, 15], [32, 32], spread=True).first_shares()
    first, second = ([(piece.request, piece.first, piece.samples) for piece in share] for share in shares)
    assert (first, second) == ([(0, 0, 8), (1, 0, 8), (2, 0, 8)], [(0, 8, 8), (1, 8, 8), (2, 8, 7)])
    shares = RequestQueue([8, 8], [48, 16], spread=True).first_shares()
    assert [[piece.samples for piece in share] for share in shares] == [[6, 6], [2, 2]]


@given(st.lists(st.integers(1, 20), min_size=2, max_size=12), st.integers(2, 5))
def test_what_is_spread_is_even_within_every_request(samples: list[int], engines: int) -> None:
    shares = RequestQueue(samples, [1000] * engines, spread=True).first_shares()
    if sum(samples) < engines:
        return
    for request, count in enumerate(samples):
        each = [sum(p.samples for p in share if p.request == request) for share in shares]
        assert sum(each) == count and max(each) - min(each) <= 1


def test_an_engine_that_runs_low_gets_the_next_group_and_the_others_nothing() -> None:
    queue = RequestQueue([8] * 6, [8, 8])
    assert [len(share) for share in queue.first_shares()] == [1, 1]
    assert queue.heard(0, 8, Load(0, 8, 0)) == [Send(0, [QueuedPiece(2, 0, 8)])]
    assert queue.heard(0, 8, Load(0, 7, 1)) == []  # the group is on its way
    assert queue.heard(1, 8, Load(0, 8, 0)) == [Send(1, [QueuedPiece(3, 0, 8)])]


def test_an_idle_engine_takes_half_of_what_the_fullest_has_not_started() -> None:
    queue = RequestQueue([4, 20], [4, 4])
    shares = queue.first_shares()
    assert [[piece.samples for piece in share] for share in shares] == [[4], [5]]
    assert queue.heard(1, 5, Load(1, 4, 0)) == []
    queue.delivered(0, 0, 4)
    sent = queue.heard(0, 4, Load(0, 0, 4))
    assert [action.engine for action in sent] == [0]
    queue.heard(0, 9, Load(1, 4, 0))


@pytest.mark.parametrize(("unstarted", "taken"), [(10, [Take(1, 4)]), (2, [Take(1, 1)]), (1, [Take(1, 1)]), (0, [])])
def test_what_an_engine_has_no_rows_for_goes_to_one_that_has(unstarted: int, taken: list[Take]) -> None:
    queue = RequestQueue([4, 4 + unstarted], [4, 4 + unstarted])
    queue.first_shares()
    assert queue.heard(1, 4 + unstarted, Load(unstarted, 4, 0)) == []  # no pages for more
    queue.delivered(0, 0, 4)
    assert queue.heard(0, 4, Load(0, 0, 4)) == taken


def test_the_last_sample_of_an_engine_that_could_start_it_is_not_taken() -> None:
    queue = RequestQueue([1, 1], [1, 1])
    queue.first_shares()
    queue.delivered(0, 0, 1)
    assert queue.heard(0, 1, Load(0, 0, 1)) == []
