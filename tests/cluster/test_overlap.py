"""`run.overlap`: gradients that are summed over ranks while the backward pass runs are the same bits, and a rank that fails
leaves nobody waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as processes

from tests.cluster import overlapped_steps
from tests.cluster.overlapped_steps import FAULTS
from trimtab.cluster.mesh import open_store

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """By rank: what it found."""
    folder, store = tmp_path_factory.mktemp("overlap"), open_store()
    processes.start_processes(overlapped_steps.run_rank, (store.port, folder), nprocs=2, start_method="fork")
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


CASES = [("none", "dealt"), ("optimizer", "dealt"), ("optimizer", "one rank is empty"), ("gradients", "equal")]


@pytest.mark.parametrize(("shard", "how"), CASES)
def test_the_same_bits_as_after_the_backward_pass(found: list[dict[Any, Any]], shard: str, how: str) -> None:
    after, beside = (found[0][shard, how, overlap] for overlap in (False, True))
    assert after["norms"] == beside["norms"] and after["norms"][0] > 0
    assert same(after["weights"], beside["weights"])
    assert same(beside["weights"], found[1][shard, how, True]["weights"]), "ranks have the same weights"


def test_layers_are_begun_before_the_last_pass_has_ended_and_in_one_order(found: list[dict[Any, Any]]) -> None:
    for how, tied in (("dealt", True), ("one rank is empty", False)):
        ranks = [each["optimizer", how, True]["seen"] for each in found]
        orders = [[name for name in seen if name != "pass"] for seen in ranks]
        assert orders[0] == orders[1] and orders[0], "ranks would wait for each other for ever"
        one_step = orders[1][: len(orders[1]) // 3]
        layers = [name for name in one_step if "layers." in name]
        assert layers == sorted(layers, reverse=True) and len(layers) == 3
        seen = ranks[1]
        first_step = seen[: seen.index(one_step[-1]) + 1]
        beside, after = first_step[: len(first_step) - first_step[::-1].index("pass")], first_step[::-1]
        after = after[: after.index("pass")]
        assert set(beside) >= set(layers) and "pass" not in layers
        assert ("lm_head" in beside) == (not tied)
        assert {"model.embed_tokens", "vectors"} <= set(after)
    assert [each["optimizer", "dealt", False]["seen"].count("pass") for each in found] == [
        len(each["optimizer", "dealt", False]["seen"]) for each in found
    ], "without it nothing is begun early"
    assert found[0]["optimizer", "one rank is empty", True]["seen"].count("pass") == 0


def test_all_bytes_count_and_only_what_is_waited_for_takes_time(found: list[dict[Any, Any]]) -> None:
    assert found[0]["bytes"][0] == found[0]["bytes"][1] > 0
    busy, idle = found[0]["waited"]
    assert idle > busy + 0.2, "half a second that the other was late is hidden behind the rank's own work"


@pytest.mark.parametrize("where", FAULTS)
def test_a_rank_that_runs_out_of_memory_leaves_nobody_waiting(found: list[dict[Any, Any]], where: str) -> None:
    whole = found[0]["optimizer", "one rank is empty", True]  # untied, too
    ended, failed = (each[where] for each in found)
    assert failed["failed"] and failed["left"] > 0 and not ended["failed"]
    assert ended["left"] == 0, "it was done, and did not wait"
    assert ended["norm"] == failed["norm"] == pytest.approx(whole["norms"][0], rel=1e-6)
    assert same(ended["weights"], failed["weights"])
