"""Contradictions about devices are found in the config alone."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.config.check import contradictions
from trimtab.config.schema import Config

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "task:arithmetic"},
    "reward": [{"fn": "task"}],
    "learn": {"algorithm": "grpo"},
}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"devices": 1, "shard": "optimizer"}, "has no effect on one device"),
        ({"devices": 6, "shard": "optimizer", "shard_devices": 4}, "does not divide the 6 devices"),
        ({"devices": 4, "shard": "none", "shard_devices": 2}, "every rank holds everything"),
        ({"devices": 4, "shard": "full", "shard_devices": 1}, "nothing is in parts"),
        ({"devices": 1, "overlap": True}, "has no effect on one device"),
        ({"devices": 4, "shard": "full", "overlap": False}, "always summed over ranks beside the backward pass"),
        ({"devices": 4, "rollout": {"tensor_parallel": 3}}, "Write 2, or run.devices: 3"),
        ({"devices": 2, "rollout": {"tensor_parallel": 4}}, "Write 2, or run.devices: 4"),
        ({"devices": 6, "rollout": {"tensor_parallel": 4}}, "6 devices cannot be divided into engines of 4"),
        ({"devices": 4, "sequence_parallel": 3}, "does not divide the 4 devices into equal sets"),
        ({"devices": 4, "sequence_parallel": 3}, "Write 2, or run.devices: 3"),
        ({"devices": 1, "sequence_parallel": 2}, "one device has every micro-batch whole"),
        ({"devices": 4, "sequence_parallel": {"critic": 2}}, "names critic, but this run has no critic"),
        ({"devices": 4, "sequence_parallel": {"reference": 2}}, "this run has no reference"),
        ({"devices": 4, "sequence_parallel": 2, "token_budget": 100}, "each device has 257 of it"),
        ({"devices": 2, "tensor_parallel": 2}, "does not cut layers over devices where it trains"),
        (
            {"placement": {"actor": 2, "rollout": 2}, "sequence_parallel": 4},
            "does not divide the 2 devices of actor into equal sets",
        ),
    ],
)
def test_parts_that_cannot_be(run: dict[str, Any], words: str) -> None:
    found = contradictions(Config.model_validate(BASE | {"run": run}))
    assert len(found) == 1 and words in str(found[0])


@pytest.mark.parametrize(
    "run",
    [
        {"devices": 1, "shard": "none", "shard_devices": 1, "overlap": False},
        {"devices": 4, "shard": "full", "overlap": True},
        {"devices": 8, "shard": "optimizer", "shard_devices": 4},
        {"shard": "gradients"},
        {"devices": 2},
        {"devices": 4, "rollout": {"tensor_parallel": 2}},
        {"devices": 4, "engine": "native", "rollout": {"tensor_parallel": 2}},
        {"engine": "native", "rollout": {"tensor_parallel": 1}},
        {"devices": 1, "rollout": {"tensor_parallel": 2}},
        {"devices": 4, "sequence_parallel": {"policy": 2}, "tensor_parallel": 1},
        {"devices": 4, "sequence_parallel": 4, "token_budget": 200},
        {"devices": 1, "sequence_parallel": 1},
    ],
)
def test_a_resolved_placement_loads_again(run: dict[str, Any]) -> None:
    assert not contradictions(Config.model_validate(BASE | {"run": run}))
