"""An engine in processes of its own as one of a fleet: it holds back what they have no room for, and gives that to others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.rollout.contract.test_failures import ask, done, prompts, scripted
from tests.rollout.external.test_engine import asked
from trimtab.rollout.external.backlog import Backlog
from trimtab.rollout.external.members import devices_behind, visible_devices
from trimtab.rollout.external.messages import Ask
from trimtab.rollout.external.process import EngineLost
from trimtab.rollout.feed import Bounds, CutRequest, Load, News
from trimtab.rollout.seat import owners, seat_of


class Driver:
    """What a driver says in each round; after that, that all is done once the engine is idle."""

    def __init__(self, bounds: Bounds, *news: News) -> None:
        self.bounds, self._news = bounds, list(news)
        self.loads: list[Load] = []
        self.cuts: list[CutRequest] = []

    def exchange(self, load: Load) -> News:
        self.loads.append(load)
        return self._news.pop(0) if self._news else News(last=load.idle)

    def returned(self, cuts: Sequence[CutRequest], load: Load) -> None:
        self.cuts += cuts
        self.loads.append(load)


def test_what_processes_have_no_room_for_is_given_back_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight run at a time, and one lies ready: of 12 samples in two groups three are left, the last of the second group."""
    engine, made = scripted(monkeypatch, [done(1, n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8)])
    requests = ask(prompts(2), samples=6)
    driver = Driver(Bounds.of(requests), News(give_back=5))
    groups = {group.index: group for group in engine.generate(requests, driver)}
    assert asked(made[0]) == list(range(9)) and driver.loads[0] == Load(4, 8, 0) and driver.loads[1] == Load(1, 8, 0)
    assert driver.cuts == [CutRequest(1, 3)]
    assert [len(groups[index].trajectories) for index in (0, 1)] == [6, 3]
    assert driver.loads[-1].idle


def test_what_comes_later_is_drawn_too_and_rows_that_become_free_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = scripted(monkeypatch, [done(1, n) for n in range(14)])
    first, second = ask(prompts(2), samples=7)
    driver = Driver(Bounds.of([first, second]), News([second]))
    groups = list(engine.generate([first], driver))
    assert sorted(group.index for group in groups) == [0, 1] and engine.stats.sequences == 14
    sent = [len(order.asks) for order in made[0].sent if hasattr(order, "asks")]
    assert sent[:2] == [7, 2] and sum(sent) == 14, "a process has one more than it runs"
    assert engine.waits > 0, "a rank that waits for its engine is alive"


def test_a_process_that_is_lost_repeats_what_it_was_given_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = scripted(monkeypatch, [done(1, 0), EngineLost("gone")], [done(1, n) for n in range(1, 12)])
    requests = ask(prompts(1), samples=12)
    (group,) = engine.generate(requests, Driver(Bounds.of(requests)))
    assert [t.sample for t in group.trajectories] == list(range(12))
    again = next(order for order in made[1].sent if hasattr(order, "asks"))
    assert [each.id for each in again.asks] == [*range(1, 10)] and engine.stats.restarts == 1


def test_a_backlog_keeps_the_first_samples_of_a_request() -> None:
    backlog = Backlog()
    for index, ids in enumerate([(0, 1, 2), (3, 4)]):
        backlog.add(index, [Ask(id, [1], 1, 0) for id in ids])
    assert [each.id for each in backlog.next_of_one_request(2)] == [0, 1]
    assert backlog.hand_back(2) == [CutRequest(1, 2)]
    assert [each.id for each in backlog.next_of_one_request(9)] == [2] and not len(backlog)
    assert backlog.next_of_one_request(1) == [] and backlog.hand_back(1) == []


@pytest.mark.parametrize(
    ("ranks", "parts", "first"), [(4, 1, [0, 1, 2, 3]), (4, 2, [0, 2]), (8, 4, [0, 4]), (2, 2, [0])]
)
def test_the_first_rank_of_each_set_owns_its_engine(ranks: int, parts: int, first: list[int]) -> None:
    devices = [f"cuda:{2 * n}" for n in range(ranks)]  # every second one was free
    seats = [seat_of(rank, devices, parts) for rank in range(ranks)]
    assert owners(ranks, parts) == [rank for rank, seat in enumerate(seats) if seat.owner] == first
    for rank, seat in enumerate(seats):
        assert len(seat.devices) == parts and torch.device(devices[rank]) in seat.devices


def test_a_library_sees_the_devices_of_its_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices([torch.device("cuda:2"), torch.device("cuda:5")]) == {"CUDA_VISIBLE_DEVICES": "2,5"}
    assert visible_devices(devices_behind(torch.device("cuda:3"), 2)) == {"CUDA_VISIBLE_DEVICES": "3,4"}
    assert visible_devices(devices_behind(torch.device("cuda"), 2)) == visible_devices([torch.device("cpu")]) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,GPU-x")
    assert visible_devices([torch.device("cuda:2")]) == {"CUDA_VISIBLE_DEVICES": "GPU-x"}
