"""Ranks that share micro-batches survive what ranks survive: memory that runs out on one of them, a death, a resume with another
number of them. Others wait for such a rank inside a forward or backward pass, and nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.cluster.test_lost_ranks import at_order, die
from tests.forked_ranks import fork_ranks
from tests.invariants.test_oom_ranks import FAULTS, USUAL
from tests.running import letters
from trimtab.cluster.mesh import Mesh

pytestmark = pytest.mark.timeout(120)
USUAL = USUAL | {"reward": letters, "run": {**USUAL["run"], "sequence_parallel": 2, "token_budget": 32}}
WORST = 1e-7


def train(model: Path, folder: Path, **changes: Any) -> running.Trained:
    return running.train({"path": str(model), "dtype": "float64"}, folder, USUAL, changes)


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    alone = {"devices": 1, "shard": "auto", "sequence_parallel": 1, "token_budget": 64}
    found = train(model_folder, tmp_path_factory.mktemp("whole") / "run", run=alone)
    return load_file(found.folder / "final/model.safetensors")


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)


def assert_same(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    weights = load_file(folder / "final/model.safetensors")
    for key, expected in whole.items():
        torch.testing.assert_close(weights[key], expected, atol=WORST, rtol=0)


def in_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two exchanges of a backward pass, where the other rank waits for the second."""
    exchange, calls = Mesh.among_sequence, [0]

    def failing(mesh: Mesh, *given: Any) -> None:
        calls[0] += 1
        if mesh.rank == 1 and calls[0] == 11:
            raise torch.OutOfMemoryError("CUDA out of memory")
        exchange(mesh, *given)

    monkeypatch.setattr(Mesh, "among_sequence", failing)


PLACES = {name: FAULTS[name] for name in ("forward", "backward of the second step", "prepare")} | {
    "between two exchanges": in_exchange
}
QUICK = {("optimizer", "forward"), ("gradients", "between two exchanges"), ("full", "backward of the second step")}


@pytest.mark.parametrize(
    ("shard", "name"),
    [
        pytest.param(shard, name, marks=() if (shard, name) in QUICK else pytest.mark.slow)
        for shard in ("none", "optimizer", "gradients", "full")
        for name in PLACES
    ],
)
def test_memory_that_runs_out_on_a_rank_that_others_wait_for(
    model_folder: Path, tmp_path: Path, whole, shard: str, name: str, monkeypatch, capsys
) -> None:
    PLACES[name](monkeypatch)
    found = train(model_folder, tmp_path / "run", run={"shard": shard})
    assert_same(found.folder, whole)
    assert "out of memory" in capsys.readouterr().out
    assert "run/rank_restarts" not in found.metrics[-1], "survived, not started again"


def test_a_rank_that_dies_and_a_resume_with_other_numbers_of_ranks(
    model_folder: Path, tmp_path: Path, whole, monkeypatch, capsys
) -> None:
    at_order(monkeypatch, "accumulate", 1, die, once=tmp_path / "died")
    first = train(model_folder, tmp_path / "run", learn={"steps": 1})
    assert "rank 1 is lost" in capsys.readouterr().out
    assert first.metrics[-1]["run/rank_restarts"] == 1.0
    four = {"devices": 4, "shard": "gradients", "sequence_parallel": 4, "token_budget": 16}
    found = train(model_folder, tmp_path / "run", run=four, resume=True)
    assert_same(found.folder, whole)
    assert [row["step"] for row in found.metrics] == [1, 2]
