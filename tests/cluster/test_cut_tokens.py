"""An engine that is cut over ranks draws the tokens of one that is whole, with its log-probs, whatever runs short of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster.cut_rank import spoil, whole_engine
from cluster.test_fleet import TESTS, asked, told

from trimtab.base.errors import EngineError
from trimtab.cluster.fleet import Fleet
from trimtab.cluster.mesh import open_store
from trimtab.cluster.ranks import Ranks
from trimtab.rollout.engine import Request
from trimtab.rollout.native.together import Together
from trimtab.rollout.trajectory import Group

pytestmark = pytest.mark.timeout(120)
TIED: dict[str, Any] = {"tie_word_embeddings": True}


def start(count: int, logs: Path) -> Ranks:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    store = open_store()
    setups = [(rank, count, store.port) for rank in range(count)]
    ranks = Ranks("cluster.cut_rank", setups, logs, variables=[variables] * count)
    ranks.store = store
    ranks.wait_until_built()
    return ranks


@pytest.fixture(scope="module")
def two(forked_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = start(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(forked_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = start(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def fleet_of(
    ranks: Ranks, parts: int, architecture: str, changes: dict[str, Any], lora: bool, **settings: Any
) -> Fleet:
    found = ranks.ask("build", parts, architecture, changes, lora, settings)
    assert all(f"cut over {parts} devices" in each for each in found)
    return Fleet(ranks, found[0], settings.get("max_sequences", 64), [{}] * len(ranks), parts, joint=True)


def check_same(found: list[Group], wanted: list[Group]) -> None:
    assert told(found) == told(wanted)
    mine, theirs = ({group.index: group.trajectories for group in groups} for groups in (found, wanted))
    for index, trajectories in theirs.items():
        for one, other in zip(mine[index], trajectories):
            torch.testing.assert_close(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "changes", "lora", "settings"),
    [
        ("llama", {}, False, {"kv_bytes": 40_000, "prefill_tokens": 16}),  # chunks, and sequences that are preempted
        ("phi3", {}, True, {}),  # joined projections
        ("gemma3_text", TIED, False, {"max_sequences": 5}),  # windows, soft caps, a scaled embedding
        ("qwen2", {"vocab_size": 83}, True, {}),  # biases, a vocabulary that 2 does not divide
    ],
)
def test_two_ranks_draw_the_tokens_of_one(
    two: Ranks, architecture: str, changes: dict[str, Any], lora: bool, settings: dict[str, Any]
) -> None:
    whole = whole_engine(architecture, changes, lora, **settings)
    fleet = fleet_of(two, 2, architecture, changes, lora, **settings)
    requests = [r for r in asked() if max(r.prompt.tokens) < 83]
    check_same(list(fleet.generate(requests)), list(whole.generate(requests)))
    if "kv_bytes" in settings:
        assert fleet.stats.preempted == whole.stats.preempted > 0
    spoil(whole.policy.model)
    whole.publish(1)
    two.ask("step_and_publish")
    check_same(list(fleet.generate(requests)), list(whole.generate(requests)))


@pytest.mark.parametrize(
    ("parts", "architecture", "changes"),
    [(2, "llama", TIED), (4, "llama", {})],  # two engines; and one whose ranks share key/value heads
)
def test_four_ranks_draw_the_tokens_of_one(four: Ranks, parts: int, architecture: str, changes: dict[str, Any]) -> None:
    fleet = fleet_of(four, parts, architecture, changes, False)
    check_same(list(fleet.generate(asked())), list(whole_engine(architecture, changes).generate(asked())))
    one = sum(p.nbytes for p in whole_engine(architecture, changes).policy.model.parameters())
    assert max(four.ask("own_bytes")) < 0.8 * one / 1.2


@pytest.mark.parametrize(
    ("rank", "where", "after", "lowers"),
    [
        (1, "sum", 3, "prefill_tokens"),  # in the middle of a pass over prompts: the others wait in its sums
        (0, "sum", 40, "max_sequences"),
        (1, "run", 2, "max_sequences"),  # before a pass of a decode step
        (0, "prefill", 1, "prefill_tokens"),
        (1, "draw", 1, ""),  # in halves, on both ranks
        (0, "gather", 2, ""),
    ],
)
def test_a_rank_that_runs_short_costs_no_token_and_no_rank_waits(
    two: Ranks, rank: int, where: str, after: int, lowers: str
) -> None:
    fleet = fleet_of(two, 2, "llama", {}, False)
    two.ask("run_short", rank, where, after)
    check_same(list(fleet.generate(asked())), list(whole_engine("llama", {}).generate(asked())))
    lowered = two.ask("lowered")
    assert lowered[0] == lowered[1] and (lowers in lowered[0] if lowers else True)


def test_a_call_that_is_left_half_way_and_a_request_that_is_refused_leave_the_engine_whole(two: Ranks) -> None:
    fleet = fleet_of(two, 2, "llama", {}, False)
    call = fleet.generate(asked())
    next(call)
    call.close()
    long = [Request(r.prompt, r.samples, 4000, r.sampling, r.seed, r.step) for r in asked()]
    with pytest.raises(EngineError, match="exceeds the model's context"):
        list(fleet.generate(long))
    check_same(list(fleet.generate(asked())), list(whole_engine("llama", {}).generate(asked())))


def test_a_sum_that_is_missing_is_seen_before_anything_is_drawn(
    forked_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Together, "sum", lambda self, values: values)
    ranks = start(2, tmp_path / "logs")
    try:
        with pytest.raises(EngineError, match="computes different log-probs when it is cut over 2 devices"):
            ranks.ask("build", 2, "llama", {}, False, {})
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("parts", "architecture", "words"),
    [
        (2, "olmo2", "has q_norm.weight in its Olmo2Attention"),
        (2, "mixtral", "experts"),
        (4, "gpt_oss", "has sinks in its GptOssAttention"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(four: Ranks, parts: int, architecture: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        four.ask("build", parts, architecture, {}, False, {})
