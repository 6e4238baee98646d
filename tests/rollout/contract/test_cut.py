"""A model that is cut over several devices (here processes of a CPU) gives what it gives whole."""

from __future__ import annotations

import psutil
import pytest
import torch
from tiny import tiny_model

from tests.rollout.contract.engines import NO_VLLM, PYTHONS, SHAPE, make_engine
from tests.rollout.contract.test_adapters import adapted, change
from tests.rollout.contract.test_contract import ask, collect, flat, prompts, tokens
from tests.running import guarded
from trimtab.model.policy import Policy
from trimtab.rollout.external.engine import ExternalEngine

pytestmark = [
    pytest.mark.skipif(PYTHONS["vllm"]() is None, reason=NO_VLLM),
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.slow
def test_a_model_in_two_parts_gives_the_tokens_of_the_whole() -> None:
    policy = Policy(tiny_model("qwen2", tie_word_embeddings=True, **SHAPE | {"num_key_value_heads": 2}))
    engine = make_engine("vllm", policy, tensor_parallel=2, python=PYTHONS["vllm"]())  # whose processes are looked at
    assert isinstance(engine, ExternalEngine)
    native = make_engine("native", policy)
    requests = ask(prompts(4, shared=20), samples=3)
    found, wanted = collect(engine, requests), collect(native, requests)
    assert tokens(found) == tokens(wanted)
    for one, other in zip(flat(found), flat(wanted)):
        assert torch.allclose(one.logprobs, other.logprobs, atol=1e-4)

    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    for made in (engine, native):
        made.publish(1)
    new = tokens(collect(native, requests))
    assert new != tokens(wanted) and tokens(collect(engine, requests)) == new

    stopping = ask(prompts(4), samples=3, stop=["a", "e"])
    assert tokens(collect(engine, stopping)) == tokens(collect(native, stopping))

    parts = [p for p in guarded(engine.pids[0]).children(recursive=True) if "tracker" not in " ".join(p.cmdline())]
    assert len(parts) == 2
    said: list[str] = []
    engine.on_restart = said.append
    parts[1].kill()
    assert tokens(collect(engine, requests)) == new
    assert engine.stats.restarts == 1 and "one of vLLM's worker processes ended" in said[0]
    parts += guarded(engine.pids[0]).children(recursive=True)
    engine.close()
    assert psutil.wait_procs(parts, timeout=60)[1] == [], "killed, if they did not end"


@pytest.mark.slow
def test_adapters_of_a_model_in_two_parts_that_has_one_head_of_keys() -> None:
    policy = adapted()
    engine, native = make_engine("vllm", policy, tensor_parallel=2), make_engine("native", policy)
    requests = ask(prompts(4, shared=20), samples=3)
    for version in (1, 2):
        change(policy, version)
        for made in (engine, native):
            made.publish(version)
        assert tokens(collect(engine, requests)) == tokens(collect(native, requests))
    engine.close()
