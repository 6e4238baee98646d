"""A cache that holds only some of the sequences: what is preempted and computed again is what it would have been."""

from __future__ import annotations

import pytest
import torch

from tests.rollout.contract.engines import OUTSIDE, make_engine, small_policy
from tests.rollout.contract.test_contract import ask, collect, flat, prompts, tokens

BLOCK = 32 * 3 * 2 * 32 * 4
"""Bytes of 32 tokens of the small model: keys and values of three layers, 32 numbers each, in float32."""


@pytest.mark.parametrize("kind", OUTSIDE)
def test_preempted_sequences_are_those_that_were_not(kind: str) -> None:
    policy = small_policy()
    engine, native = make_engine(kind, policy, kv_bytes=9 * BLOCK), make_engine("native", policy)
    requests = ask(prompts(6, shared=20), samples=4, new=70)
    found, wanted = collect(engine, requests), collect(native, requests)
    assert tokens(found) == tokens(wanted)
    assert sum(len(t.tokens) + len(t.prompt.tokens) for t in flat(found)) > 5 * 9 * 32, "more than fits at a time"
    assert engine.stats.kv_usage > 0.7
    engine.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", OUTSIDE)
def test_memory_that_is_lent_is_free_and_comes_back(kind: str) -> None:
    """As the device sees it: KV and weights are gone, and what is generated afterwards is the same."""
    policy = small_policy()
    engine = make_engine(kind, policy, kv_bytes=2**31, lend_memory=True)
    requests = ask(prompts(4), samples=2)
    wanted = tokens(collect(engine, requests))

    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    for version in (1, 2):
        holding = free()
        engine.lend()
        assert free() - holding > 0.95 * 2**31
        engine.publish(version)
        assert abs(free() - holding) < 2**27
        assert tokens(collect(engine, requests)) == wanted
    engine.lend()
    assert tokens(collect(engine, requests)) == wanted, "without publishing again"
    engine.close()
