"""How long a sequence may be, and why: within it, what a sequence gives does not depend on what else is in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollout.test_engine import engine, generate, prompts
from tiny import VOCABULARY, tiny_model
from transformers import GPT2Config

from trimtab.data.prompt import Prompt
from trimtab.model.context import context_of
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
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
        ({"max_position_embeddings": 256, "rope_scaling": YARN}, 1024),
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


SCALED = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 10000.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("scaled", SCALED)
def test_beyond_the_first_length_packed_rows_are_transformers_own(scaled: str) -> None:
    """Sequences shorter and longer than the length that the rotation was made for, in one row, against each alone in
    transformers' eager attention; and the engine's log-probs are the trainer's there."""
    model = tiny_model("llama", torch.float64, rope_parameters=SCALED[scaled], max_position_embeddings=64)
    policy = Policy(model)
    lengths = [6, 60]
    tokens = torch.randint(3, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    plan = PackedPlan(lengths, "cpu")
    alone = tiny_model("llama", torch.float64, rope_parameters=SCALED[scaled], max_position_embeddings=64)
    alone.set_attn_implementation("eager")
    with torch.no_grad():
        found = policy.hidden(tokens, plan.positions, plan).split(lengths)
        for row, one in zip(tokens.split(lengths), found):
            expected = alone.model(input_ids=row[None], use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5)
        plain = Policy(tiny_model("llama", torch.float64, max_position_embeddings=64))
        assert not torch.allclose(plain.hidden(tokens, plan.positions, plan)[-1], found[1][-1], rtol=1e-3, atol=1e-3)
    native = engine(policy)
    trajectories = generate(native, [Prompt(i, "", p.tokens[:30]) for i, p in enumerate(prompts(2, shared=28))])
    assert max(len(t.prompt.tokens) + len(t.tokens) for t in trajectories.values()) > 32
    for t in trajectories.values():
        row = torch.cat((torch.tensor(t.prompt.tokens), t.tokens))
        with torch.no_grad():
            logp = alone(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)
        drawn = logp[len(t.prompt.tokens) - 1 : -1].gather(1, t.tokens[:, None])[:, 0]
        torch.testing.assert_close(t.logprobs.double(), drawn, rtol=1e-4, atol=1e-4)
