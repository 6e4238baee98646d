"""The engine and packed rows of models whose layers carry a state, on a CUDA device: the CPU's tokens, with states in graphs."""

from __future__ import annotations

import pytest
import torch
from rollout.test_engine import assert_same, engine, generate, prompts
from tiny import tiny_hybrid

from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KINDS = ["qwen3_next", "lfm2", "nemotron_h", "falcon_h1"]


@pytest.fixture(scope="module", autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("name", KINDS)
def test_a_hybrid_samples_what_the_cpu_samples(name: str) -> None:
    asked = prompts(2, shared=3)
    expected = generate(engine(Policy(tiny_hybrid(name)), max_sequences=3), asked, samples=2, new=4)
    native = engine(Policy(tiny_hybrid(name).cuda()), max_sequences=3)
    assert native.description.startswith("the model's own modules in CUDA graphs")
    assert_same(expected, generate(native, asked, samples=2, new=4))
    assert native.stats.graph_share == 1.0
    assert_same(expected, generate(native, asked, samples=2, new=4))  # the graphs again, on slots that have been used


def test_states_survive_memory_that_is_lent_and_pages_that_run_out() -> None:
    asked = prompts(3)
    policy = Policy(tiny_hybrid("qwen3_next").cuda())
    one = sum(s.bytes_per_token(4) for s in layer_shapes(policy).values())
    native = engine(policy, lend_memory=True, max_sequences=4)
    first = generate(native, asked, samples=2, new=6)
    native.lend()
    assert_same(first, generate(native, asked, samples=2, new=6))
    tight = engine(policy, prefill_tokens=7, max_sequences=4, kv_bytes=12 * 4 * one)
    assert_same(first, generate(tight, asked, samples=2, new=6))
