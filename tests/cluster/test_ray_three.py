"""Three nodes: the weights of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quick_rewards import variety
from safetensors.torch import load_file

from tests import running
from tests.cluster.conftest import USUAL
from tests.cluster.ray_cluster import nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TOLERANCE = 2e-5
"""Of the way that the weights went (tests/invariants/test_ranks.py)."""


@pytest.fixture
def three() -> Iterator[str]:
    with nodes(3) as found:
        yield found.address


def test_three_nodes_have_the_weights_of_one_process(three: str, model_folder: Path, tmp_path: Path) -> None:
    def after(name: str, **run: Any) -> dict[str, Any]:
        changes = {"run": {"device": "cpu", "threads": 1, "reward_workers": 1, **run}, "reward": variety}
        usual = {**USUAL, "run": {}, "learn": {**USUAL["learn"], "optimizer": {"eps": 1e-3}}}
        found = running.train({"path": str(model_folder), "dtype": "float64"}, tmp_path / name, usual, changes)
        return load_file(found.folder / "final/model.safetensors")

    start = load_file(model_folder / "model.safetensors")
    alone = after("alone", devices=1)
    several = after("several", cluster=three, shard="gradients")
    went = max((alone[name] - start[name]).abs().max() for name in alone)
    assert went > 0
    assert max((alone[name] - several[name]).abs().max() for name in alone) <= TOLERANCE * went


def test_roles_on_nodes_of_their_own_have_the_weights_of_one_process(
    three: str, model_folder: Path, tmp_path: Path
) -> None:
    def after(name: str, **run: Any) -> dict[str, Any]:
        changes = {"run": {"device": "cpu", "threads": 1, "reward_workers": 1, **run}, "reward": variety}
        learn = {**USUAL["learn"], "algorithm": "ppo", "critic": {"lr": 1e-2}, "staleness": 1}
        usual = {**USUAL, "run": {}, "learn": learn}
        found = running.train(model_folder, tmp_path / name, usual, changes)
        return load_file(found.folder / "final/model.safetensors")

    alone = after("alone", devices=1)
    several = after("several", cluster=three, placement={"actor": 1, "critic": 1, "rollout": 1})
    assert alone.keys() == several.keys() and all(bool((alone[name] == several[name]).all()) for name in alone)
