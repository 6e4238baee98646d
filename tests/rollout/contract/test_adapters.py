"""Adapters are published by themselves: the weights that they are added to are sent once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rollout.contract.engines import DEVICE, OUTSIDE, make_engine, small_model, small_policy
from tests.rollout.contract.test_contract import ask, collect, flat, prompts, tokens
from trimtab.config.schema import Lora
from trimtab.model.adapters import add_adapters
from trimtab.model.policy import Policy
from trimtab.rollout.external.agreement import trainer_logprobs
from trimtab.rollout.external.vllm.core import lora_room
from trimtab.rollout.external.weights import SharedWeights, named_weights
from trimtab.rollout.trajectory import Trajectory


def adapted(rank: int = 4, dtype: torch.dtype = torch.float32) -> Policy:
    return Policy(add_adapters(small_model().to(DEVICE, dtype), Lora(r=rank), seed=0))


@torch.no_grad()
def change(policy: Policy, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=numbers))


@pytest.mark.parametrize("kind", OUTSIDE)
def test_adapters_that_were_published_last_are_generated_with(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "vllm" and DEVICE.type == "cuda":
        pytest.skip("on a GPU vLLM computes adapters only in half precision")
    policy = adapted()
    change(policy, 1)
    engine, native = make_engine(kind, policy), make_engine("native", policy)
    monkeypatch.setattr(SharedWeights, "publish", lambda self: pytest.fail("the weights were sent again"))
    requests = ask(prompts(4, shared=40), samples=3)
    seen = []
    for version in (1, 2, 3):
        change(policy, version)
        engine.publish(version)
        native.publish(version)
        found, wanted = collect(engine, requests), collect(native, requests)
        assert tokens(found) == tokens(wanted)
        for one, other in zip(flat(found), flat(wanted)):
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
        seen.append(tokens(found))
    assert seen[0] != seen[1] != seen[2]
    engine.close()


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", OUTSIDE)
def test_adapters_in_half_precision_are_those_of_the_trainer(kind: str, eager: bool) -> None:
    """Tokens may differ from the native engine's by rounding; log-probs are the trainer's, and no other version's. Between two
    rollouts the engine's memory is given up."""
    policy = adapted(dtype=torch.bfloat16)
    engine = make_engine(kind, policy, eager=eager, lend_memory=True)
    for version in (1, 2):
        change(policy, version)
        engine.publish(version)
        found = flat(collect(engine, ask(prompts(8, shared=40), samples=4)))
        now = gap(policy, found)
        change(policy, version + 10)
        assert now < 0.15 and gap(policy, found) > 1.0
        engine.lend()
    engine.close()


def gap(policy: Policy, found: list[Trajectory]) -> float:
    """Mean difference of log-probs to the trainer's, in nats."""
    return float(torch.cat([(t.logprobs - trainer_logprobs(policy, t)).abs() for t in found]).mean())


def test_weights_have_the_names_of_the_checkpoint() -> None:
    assert set(dict(named_weights(adapted()))) == set(dict(named_weights(small_policy())))


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (64, 64), (300, 320), (512, 512)])
def test_ranks_that_vllm_has_no_kernels_for_get_the_next(rank: int, room: int) -> None:
    assert lora_room(rank) == room


def test_only_the_latest_adapters_are_kept(tmp_path: Path) -> None:
    shared = SharedWeights(adapted())
    first, second = shared.write_adapters(tmp_path), shared.write_adapters(tmp_path)
    assert first != second and [str(folder) for folder in tmp_path.iterdir()] == [second]
    shared.close()
    shared.close()
    assert SharedWeights(small_policy()).write_adapters(tmp_path) is None
