"""How long a sequence may be, and why: within it, what a sequence gives does not depend on what else is in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_model
from transformers import GPT2Config

from trimtab.model.context import context_of
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 256}, 256),
        ({}, 2**31),
        ({"max_position_embeddings": 256, "rope_parameters": LONG | {"original_max_position_embeddings": 16}}, 16),
        ({"max_position_embeddings": 256, "rope_scaling": LONG, "original_max_position_embeddings": 32}, 32),
        ({"max_position_embeddings": 256, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 32}, 32),
        ({"max_position_embeddings": 256, "rope_parameters": LONG}, 256),
        ({"max_position_embeddings": 256, "rope_parameters": {"full_attention": LONG}, "original_max_position_embeddings": 9}, 9),
        ({"max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}}, 256),
    ],
)  # fmt: skip
def test_the_longest_sequence_of_a_config(config: dict[str, Any], tokens: int) -> None:
    assert context_of(config) == tokens


def test_positions_by_another_name() -> None:
    assert context_of(GPT2Config(n_positions=48)) == 48


def test_with_longrope_a_sequence_does_not_depend_on_its_neighbours() -> None:
    rotation = LONG | {"original_max_position_embeddings": 16}
    policy = Policy(tiny_model("phi3", rope_parameters=rotation, original_max_position_embeddings=16))
    longest = policy.context_tokens
    tokens = torch.randint(3, VOCABULARY, (6 + longest,), generator=torch.Generator().manual_seed(1))
    both, alone = PackedPlan([6, longest], "cpu"), PackedPlan([6], "cpu")
    with torch.no_grad():
        beside = policy.hidden(tokens, both.positions, both)[:6]
        torch.testing.assert_close(policy.hidden(tokens[:6], alone.positions, alone), beside)
