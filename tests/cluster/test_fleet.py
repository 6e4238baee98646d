"""Several engines in processes of their own draw the tokens that one engine draws."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster.engine_rank import make_engine
from tiny import VOCABULARY, tiny_model

from trimtab.base.errors import EngineError
from trimtab.cluster import fleet as fleets
from trimtab.cluster.fleet import Fleet
from trimtab.cluster.ranks import RankLost, Ranks
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Request
from trimtab.rollout.trajectory import Group

TESTS = Path(__file__).parents[1]


def start(count: int, logs: Path) -> Ranks:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = Ranks("cluster.engine_rank", [None] * count, logs, variables=[variables] * count)
    ranks.wait_until_built()
    return ranks


@pytest.fixture(scope="module")
def three(forked_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = start(3, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


class First:
    """The first few of some ranks."""

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks, self._count = ranks, count
        self.begin, self.hear, self.say = ranks.begin, ranks.hear, ranks.say

    def __len__(self) -> int:
        return self._count

    @property
    def closed(self) -> bool:
        return self._ranks.closed


def asked(uneven: bool = True) -> list[Request]:
    """Groups of 1 to 9 samples, with limits of their own."""
    g = torch.Generator().manual_seed(3)
    requests = []
    for number in range(9):
        length, samples = (int(torch.randint(1, most, (), generator=g)) for most in (24, 10))
        prompt = Prompt(number, "", torch.randint(3, VOCABULARY, (length,), generator=g).tolist())
        limits: Any = torch.randint(1, 20, (samples,), generator=g).tolist() if uneven else 12
        requests.append(Request(prompt, samples, limits, Sampling(), seed=1, step=2, first_sample=number % 2))
    return requests


def told(groups: list[Group]) -> dict[int, list[tuple[Any, ...]]]:
    return {
        group.index: [(t.sample, t.tokens.tolist(), t.finish, t.text) for t in group.trajectories] for group in groups
    }


@pytest.fixture(scope="module")
def alone() -> list[Group]:
    return list(make_engine(Policy(tiny_model("llama"))).generate(asked()))


CASES: list[tuple[int, list[tuple[dict[str, Any], float]]]] = [
    (1, [({"max_sequences": 4}, 0.0)]),
    (2, [({}, 0.0), ({}, 0.0)]),
    (2, [({"max_sequences": 3, "prefix_cache": False}, 0.02), ({"max_sequences": 7}, 0.0)]),
    (
        3,
        [({"max_sequences": 2}, 0.05), ({"max_sequences": 5, "prefix_cache": False}, 0.0), ({"max_sequences": 1}, 0.0)],
    ),
    (3, [({"max_sequences": 20, "kv_bytes": 2**15}, 0.02), ({"max_sequences": 2}, 0.0), ({"max_sequences": 2}, 0.0)]),
]


@pytest.mark.parametrize(("count", "engines"), CASES)
def test_a_fleet_draws_the_tokens_of_one_engine(
    three: Ranks, alone: list[Group], count: int, engines: list[tuple[dict[str, Any], float]]
) -> None:
    three.ask_each("build", [*engines, *[({}, 0.0)] * (3 - count)])
    fleet = Fleet(First(three, count), "", 64, [settings for settings, _ in engines])  # type: ignore[arg-type]
    groups = list(fleet.generate(asked()))
    assert told(groups) == told(alone)
    assert len(groups) == len(asked())
    for group in groups:
        assert group.prompt == asked()[group.index].prompt
    assert fleet.stats.sequences == sum(request.samples for request in asked())
    same = {group.index: group for group in alone}
    for group in groups:
        for mine, its in zip(group.trajectories, same[group.index].trajectories):
            torch.testing.assert_close(mine.logprobs, its.logprobs, atol=2e-5, rtol=0)


def test_samples_that_are_spread_over_all_engines_are_the_same(
    three: Ranks, alone: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    three.ask("build", {}, 0.0)
    decided: list[tuple[int, float]] = []
    monkeypatch.setattr(fleets, "pays_to_spread", lambda asked, *given: bool(decided.append(given)) or True)
    fleet = Fleet(three, "", 64, [{}] * 3, tokens_per_step=7.0)
    assert told(list(fleet.generate(asked()))) == told(alone)
    assert decided == [(3, 7.0)]
    prompts = sum(len(request.prompt.tokens) for request in asked())
    again = sum(len(r.prompt.tokens) * (min(r.samples, 3) - 1) for r in asked())
    assert fleet.stats.prefill_tokens + fleet.stats.cached_prefix_tokens >= prompts + again, "every engine has them all"


class Told:
    """Ranks that note what they are asked."""

    closed = False

    def __init__(self, count: int) -> None:
        self.orders: list[str] = []
        self._count = count

    def __len__(self) -> int:
        return self._count

    def ask(self, order: str, *given: Any) -> list[Any]:
        self.orders.append(order)
        return [None] * self._count


@pytest.mark.parametrize(("parts", "room"), [(1, []), (2, ["make_room"])])
def test_memory_that_several_ranks_lent_one_engine_is_free_before_it_wakes(parts: int, room: list[str]) -> None:
    ranks = Told(4)
    fleet = Fleet(ranks, "vLLM", 8, [{}] * 4, parts=parts)  # type: ignore[arg-type]
    for _ in range(2):
        fleet.lend()
        fleet.publish(1)
        fleet.publish(2)
    assert ranks.orders == ["lend", *room, "publish", "publish"] * 2
    assert ("2 engines on 4 devices" in fleet.description) is (parts == 2)


def test_a_fleet_goes_on_after_a_caller_that_stopped_listening_and_after_a_refusal(
    three: Ranks, alone: list[Group]
) -> None:
    three.ask("build", {"max_sequences": 3}, 0.0)
    fleet = Fleet(three, "", 3, [{}] * 3)
    stopped = fleet.generate(asked())
    next(stopped)
    stopped.close()
    bad = [*asked(), Request(Prompt(99, "", [VOCABULARY + 5]), 2, 4, Sampling(), seed=0, step=0)]
    with pytest.raises(EngineError, match="prompt 99"):
        list(fleet.generate(bad))
    assert told(list(fleet.generate(asked()))) == told(alone)


def test_a_rank_that_dies_while_it_generates_ends_all(forked_ranks: None, tmp_path: Path) -> None:
    ranks = start(2, tmp_path)
    try:
        ranks.ask("build", {"max_sequences": 1}, 0.05)
        groups = Fleet(ranks, "", 1, [{}] * 2).generate(asked())
        next(groups)
        os.killpg(ranks._ranks[1].process.pid, 9)
        with pytest.raises(RankLost, match="rank 1"):
            list(groups)
        assert ranks.closed
    finally:
        ranks.close()
