"""Law 7 on a device with a meter: what a plan predicts for rollout and update is what is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn, Sampling
from trimtab.config.run import Run
from trimtab.data.prompt import Prompt
from trimtab.model.kernel_choice import fuse
from trimtab.model.memory import free
from trimtab.model.policy import Policy
from trimtab.plan.job import Job
from trimtab.plan.ledger import GIB
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.watch import PlanWatch
from trimtab.rollout.engine import Request
from trimtab.rollout.native.engine import NativeEngine
from trimtab.run.machine import machine_here, memory_limit
from trimtab.run.shapes import shape_of_model
from trimtab.run.tuner import longest_samples, time_update
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda")
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
LOWEST, HIGHEST = 0.98, 1.08


def planned(kept: bool | str, budget: int = 8192) -> tuple[Policy, Plan]:
    config = AutoConfig.for_model(
        "qwen2", **SIZES, num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    policy = Policy(model)
    fuse(policy)
    job = Job(shape_of_model(policy.model), 2, 16, 8, 128, 128, 256, fused=policy.fused, tiled_head=policy.tiled_head)
    return policy, make_plan(Run(token_budget=budget, checkpoint_activations=kept), job, machine_here(DEVICE))


def updater_of(policy: Policy, plan: Plan) -> Updater:
    run = plan.run
    return Updater(
        policy,
        PolicyGradient(resolve(Learn(loss="on_policy", aggregate="token_mean", steps=1))),
        resolve(Learn(loss="on_policy", aggregate="token_mean", steps=1)),
        token_budget=run.token_budget,
        score_token_budget=run.token_budget,
        logprob_chunk=run.logprob_chunk,
        checkpoint_activations=run.checkpoint_activations,
    )


@pytest.mark.parametrize("kept", [False, "some", True])
def test_an_update_takes_what_was_predicted(kept: bool | str) -> None:
    policy, plan = planned(kept)
    free(DEVICE)
    updater = updater_of(policy, plan)
    others = (
        torch.cuda.memory_allocated() - sum(p.nbytes for p in policy.model.parameters()) - updater.optimizer.state_bytes
    )
    samples = [s for _ in range(2) for s in longest_samples(plan.job, plan.run.token_budget, plan.job.shape.vocabulary)]
    updater.step(samples, 1e-6, 0.0)
    torch.cuda.reset_peak_memory_stats()
    stats = updater.step(samples, 1e-6, 0.0)
    watch = PlanWatch(plan)
    watch.saw(stats.sizes, kept, plan.run.logprob_chunk, False)
    measured = torch.cuda.max_memory_allocated() - max(0, others)
    assert LOWEST < watch.update_bytes(stats.sizes) / measured < HIGHEST


def test_a_rollout_takes_what_was_predicted() -> None:
    policy, plan = planned(False)
    rollout, job = plan.run.rollout, plan.job
    free(DEVICE)  # of the tests before: `before` must not count what is freed later
    before = torch.cuda.memory_allocated() - sum(p.nbytes for p in policy.model.parameters())
    engine = NativeEngine(
        policy, None, [], kv_bytes=rollout.kv_memory, page_tokens=rollout.page_tokens, max_sequences=rollout.max_sequences,
        prefill_tokens=rollout.prefill_tokens, prefix_cache=False, lend_memory=rollout.lend_memory,
    )  # fmt: skip
    words = torch.randint(3, job.shape.vocabulary, (job.prompts, job.typical_prompt)).tolist()
    requests = [Request(Prompt(i, "", row), job.samples, 64, Sampling(), 0, 0) for i, row in enumerate(words)]
    torch.cuda.reset_peak_memory_stats()
    for _ in engine.generate(requests):
        pass
    measured = torch.cuda.max_memory_allocated() - before + engine.non_torch_bytes
    elsewhere = ("masters", "optimizer state", "workspaces")  # not made here, or before by the policy's own check
    others = sum(size for name, size in plan.ledger["rollout"].device.items() if name in elsewhere)
    assert LOWEST < (plan.ledger["rollout"].allocated - others) / measured < HIGHEST
    engine.close()


def test_this_machine_is_seen_as_it_is() -> None:
    machine = machine_here(DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    assert not machine.cpu and 0.5 * total < machine.device.memory < 1.02 * total
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        limited = machine_here(DEVICE).device.memory
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert limited < 0.26 * total + GIB


def test_run_memory_bounds_the_plan_and_the_allocator() -> None:
    run, before = Run(memory=4 * GIB), torch.cuda.get_per_process_memory_fraction()
    free(DEVICE)
    with memory_limit(run, DEVICE):
        assert machine_here(DEVICE).device.memory <= 4 * GIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * GIB, dtype=torch.uint8, device=DEVICE)
    assert torch.cuda.get_per_process_memory_fraction() == before


def test_sizes_are_timed_and_those_that_do_not_fit_are_told() -> None:
    policy, plan = planned(False)
    updater = updater_of(policy, plan)
    fitting = time_update(updater, plan.job, 4096)
    assert fitting.rate is not None and fitting.rate > 0 and fitting.peak is not None and fitting.peak > 0
    free(DEVICE)
    limit = torch.cuda.memory_allocated() + GIB  # the gradients and 512 tokens, not 65,536
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(DEVICE).total_memory)
    try:
        assert time_update(updater, replace(plan.job, prompts=64), 65536).rate is None
        assert time_update(updater, plan.job, 512).rate is not None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
