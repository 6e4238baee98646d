"""Running out of memory on a CUDA device, for real: the allocator is given less than the step wants.

The recovered step is compared with one that had the whole device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from gpu.test_update_gpu import distance
from rollout.test_engine import assert_same, engine, generate, prompts
from tiny import VOCABULARY, tiny_model
from update.test_guard import FakeEngine

from trimtab.base.errors import MemoryExhausted
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.model.kernel_choice import fuse
from trimtab.model.memory import Shortage, attempt, free
from trimtab.model.policy import Policy
from trimtab.update.batch import Sample
from trimtab.update.guard import Guard
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MIB = 2**20
DEVICE = torch.device("cuda")
SIZE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "max_position_embeddings": 4096}


@contextmanager
def at_most(extra_bytes: int) -> Iterator[None]:
    """The allocator may take so much beyond what is in use now."""
    free(DEVICE)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        free(DEVICE)


def samples(count: int = 32, length: int = 512) -> list[Sample]:
    g = torch.Generator().manual_seed(0)
    return [
        Sample(
            torch.randint(3, VOCABULARY, (64,), generator=g).tolist(),
            torch.randint(3, VOCABULARY, (length,), generator=g),
            advantages=torch.randn((), generator=g).expand(length),
            weights=torch.full((length,), 1 / (count * length)),
            engine_logprobs=torch.full((length,), -4.5),
        )
        for _ in range(count)
    ]


def guarded(dtype: torch.dtype, fused: bool) -> tuple[Guard, list[str]]:
    policy = Policy(tiny_model("llama", dtype, **SIZE).cuda(), check=False)
    if fused:
        fuse(policy)
        assert policy.fused
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=32768,
        score_token_budget=32768,
        logprob_chunk=4096,
        checkpoint_activations=False,
    )
    said: list[str] = []
    return Guard(updater, FakeEngine(), least_kv_tokens=64, report=lambda r: said.append(str(r))), said


def gradient(guard: Guard, batch: list[Sample]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    optimizer = guard.updater.optimizer
    original = optimizer._lay_out_gradients

    def capture() -> None:
        for (name, _), grad in zip(guard.updater.policy.model.named_parameters(), optimizer.grads()):
            found[name] = grad.double().cpu()
        original()

    optimizer._lay_out_gradients = capture
    guard.step(batch, 1e-4, 0.0)
    return found


def peak_of(guard: Guard, batch: list[Sample]) -> int:
    """Bytes that a step takes beyond what is in use before it."""
    free(DEVICE)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    guard.step(batch, 1e-4, 0.0)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("share", [0.7, 0.3])
def test_a_step_with_too_little_memory_has_the_gradient_of_one_with_enough(
    dtype: torch.dtype, fused: bool, share: float
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    batch = samples()
    plenty, quiet = guarded(dtype, fused)
    wanted = peak_of(plenty, batch)
    del plenty
    plenty, quiet = guarded(dtype, fused)
    expected = gradient(plenty, batch)
    assert quiet == []
    del plenty
    guard, said = guarded(dtype, fused)
    with at_most(int(wanted * share)):
        found = dict(gradient(guard, batch))
        told = len(said)
        assert told >= 1, "it was to run out"
        guard.step(batch, 1e-4, 0.0)
        assert len(said) == told, "the second step knows"
    assert distance(found, expected) <= (1e-4 if dtype == torch.float32 else 2e-2)
    assert guard.ceiling["token_budget"] > guard.updater.token_budget


def test_nothing_is_left_behind_by_a_failed_attempt() -> None:
    batch = samples()
    guard, _ = guarded(torch.bfloat16, True)
    guard.step(batch, 1e-4, 0.0)
    free(DEVICE)
    before = torch.cuda.memory_allocated()
    with at_most(64 * MIB):
        assert isinstance(attempt(lambda: guard.updater.step(batch, 1e-4, 0.0)), Shortage)
        guard.updater.abandon()
        free(DEVICE)
        assert torch.cuda.memory_allocated() <= before + MIB


def test_a_device_that_is_hopelessly_full_gives_a_message_and_not_a_traceback() -> None:
    guard, said = guarded(torch.bfloat16, True)
    missing = guard.updater.state_bytes  # what moving the optimizer's state to the host frees is not enough
    with at_most(-missing), pytest.raises(MemoryExhausted, match="Bottleneck"):
        guard.step(samples(2, 2048), 1e-4, 0.0)
    assert any("offload.optimizer false -> true" in line for line in said)


def test_state_that_moves_to_the_host_in_a_run_is_the_same() -> None:
    batch = samples(4)
    stay, _ = guarded(torch.bfloat16, True)
    move, _ = guarded(torch.bfloat16, True)
    torch.use_deterministic_algorithms(True)
    try:
        for number in range(3):
            if number == 1:
                before = torch.cuda.memory_allocated()
                move.updater.optimizer.offload()
                assert torch.cuda.memory_allocated() <= before - move.updater.optimizer.state_bytes // 2
            stay.step(batch, 1e-3, 0.0)
            move.step(batch, 1e-3, 0.0)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, two in zip(stay.updater.policy.parameters(), move.updater.policy.parameters()):
        assert torch.equal(one, two)


def test_a_rollout_with_too_little_memory_samples_the_same_tokens() -> None:
    policy = Policy(tiny_model("qwen2", num_hidden_layers=2).cuda())
    asked = prompts(64)
    expected = generate(engine(policy), asked, samples=4)
    native = engine(policy, prefix_cache=False)
    said: list[str] = []
    native.on_recovery = said.append
    generate(native, asked, samples=4)  # graphs are made
    run = native._decoder.prefill
    native._decoder.prefill = lambda tokens, *rest: run(tokens, *rest) if len(tokens) <= 100 else torch.empty(2**50)
    assert_same(expected, generate(native, asked, samples=4))
    assert any("out of memory in prefill" in line for line in said)


def test_a_smaller_cache_is_really_smaller() -> None:
    policy = Policy(tiny_model("qwen2", num_hidden_layers=2).cuda())
    native = engine(policy, kv_bytes=256 * MIB)
    expected = generate(native, prompts(12))
    free(DEVICE)
    before = torch.cuda.mem_get_info()[0]
    assert native.shrink(64) is not None
    free(DEVICE)
    assert torch.cuda.mem_get_info()[0] >= before + 100 * MIB
    assert_same(expected, generate(native, prompts(12)))
