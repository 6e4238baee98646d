"""A refusal means that no values of `run` fit: the planner's verdict against a grid over every key that takes memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tests.invariants.test_gradient_invariance import step
from tests.plan.test_planner import h, qwen
from trimtab.base.errors import ConfigError, MemoryExhausted
from trimtab.config.run import Offload, Rollout, Run
from trimtab.model.policy import Policy
from trimtab.plan.devices import find_device, nearest, of_size
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import least_kv_bytes
from trimtab.plan.ledger import CUDA_CONTEXT_BYTES, GIB, MERGED, build_ledger
from trimtab.plan.place import place_over
from trimtab.plan.planner import PROFILES, limits_of, make_plan
from trimtab.plan.refusal import changes_that_fit, plan_here, refuse, with_memory
from trimtab.plan.report import offers
from trimtab.plan.shape import Block, ModelShape
from trimtab.run.build import use_planned_kernels
from trimtab.run.machine import allocator_share, load_within

SHARE = PROFILES["balanced"]


def runs(job: Job, machine: Machine, engine: str) -> list[Run]:
    """All combinations of small, middling and large values."""
    cpu = machine.cpu
    ways = [
        (recompute, Offload(optimizer=optimizer, reference=reference, activations=activations))
        for recompute in (False, "some", True)
        for optimizer, reference in product((False, True), repeat=2)
        for activations in ((False, True) if recompute is True else (False,))
    ]
    lends = (True, False) if cpu or machine.device.lends else (False,)
    found = []
    for (recompute, offload), lend, page in product(ways, lends, (32 if cpu else 16, 512)):
        for processes, larger in product((1, 2) if engine != "native" else (1,), (False, True)):
            pinned = Run(engine=engine, rollout=Rollout(processes=processes))
            rollout = Rollout(
                max_sequences=64 if larger else 1,
                kv_memory=least_kv_bytes(job, pinned, processes, page) * (3 if larger else 1),
                prefill_tokens=2048 if larger else 1,
                page_tokens=page,
                lend_memory=lend,
                processes=processes,
            )
            found.append(
                Run(
                    engine=engine,
                    device="cpu" if cpu else "cuda",
                    threads=machine.cores,
                    kernels="native" if job.fused else "plain",
                    reward_workers=max(1, min(8, machine.cores)),
                    token_budget=job.longest_trained * (2 if larger else 1),
                    score_token_budget=job.longest_trained,
                    logprob_chunk=1024 if larger else 1,
                    checkpoint_activations=recompute,
                    offload=offload,
                    rollout=rollout,
                )
            )
    return found


@st.composite
def small_models(draw: st.DrawFn) -> Job:
    """Work in which sizes decide, not the states of the model: any phase can be the fullest."""
    kv_heads, size = draw(st.sampled_from([1, 8])), draw(st.sampled_from([16, 128]))
    hidden, width = 8 * draw(st.integers(1, 64)), draw(st.integers(8, 4096))
    heads = kv_heads * draw(st.sampled_from([1, 4]))
    count = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * width
    block = Block(heads, kv_heads, size, size, width, count, count)
    vocabulary = draw(st.sampled_from([100, 50_000, 300_000]))
    shape = ModelShape("llama", hidden, vocabulary, draw(st.booleans()), (block,) * draw(st.integers(1, 24)))
    prompt, rank = draw(st.integers(1, 4000)), draw(st.sampled_from([0, 16]))
    return Job(
        shape=shape,
        itemsize=draw(st.sampled_from([2, 4])),
        prompts=draw(st.integers(1, 256)),
        samples=draw(st.integers(1, 16)),
        longest_prompt=prompt,
        typical_prompt=draw(st.integers(1, prompt)),
        completion=draw(st.integers(1, 4000)),
        eval_sequences=draw(st.sampled_from([0, 500])),
        eval_completion=draw(st.integers(1, 8000)),
        rank=rank,
        adapters=shape.lora_parameters(rank) if rank else 0,
        reference=draw(st.booleans()) and not rank,
        compared=draw(st.booleans()),
        fused=draw(st.booleans()),
        tiled_head=draw(st.booleans()),
    )


@st.composite
def tight(draw: st.DrawFn) -> tuple[Job, Machine, str, Run]:
    """A machine that has exactly what one run of the grid needs: one that needs little of the device, or of the host."""
    job, cpu = draw(small_models()), draw(st.booleans())
    engine = draw(st.sampled_from(["native", "vllm"]))
    device = replace(of_size(80 * GIB), lends=draw(st.booleans()))
    roomy = Machine(device, 1, 1000 * GIB, draw(st.integers(1, 16)), cpu=cpu)
    grid = [(run, build_ledger(job, roomy, run)) for run in runs(job, roomy, engine)]
    grid.sort(key=lambda pair: max(phase.required_bytes + phase.host_bytes for phase in pair[1].phases))
    run, ledger = draw(st.just(grid[0]) | st.sampled_from(grid))
    host = math.ceil(ledger.fullest_host.host_bytes / SHARE) + 2
    memory = math.ceil(ledger.fullest.required_bytes / SHARE) + 2
    return job, replace(roomy, host_memory=host, device=replace(device, memory=max(1, memory))), engine, run


def fits(job: Job, machine: Machine, run: Run) -> bool:
    return limits_of(machine, "balanced").missing(build_ledger(job, machine, run)) == 0


@settings(max_examples=40)
@given(tight())
def test_what_fits_by_hand_is_never_refused(case: tuple[Job, Machine, str, Run]) -> None:
    job, machine, engine, run = case
    assume(fits(job, machine, run))  # a copy of merged weights may come or go with the memory
    assert make_plan(Run(engine=engine), job, machine).fits


@settings(max_examples=40)
@given(tight(), st.sampled_from([0.8, 0.9, 0.97, 0.999]))
def test_the_verdict_is_that_of_a_grid(case: tuple[Job, Machine, str, Run], share: float) -> None:
    """With a little less than one of its runs needs: whatever of the grid fits then, the planner fits; and what the planner says
    to fit does."""
    job, machine, engine, _ = case
    less: dict[str, Any] = {"host_memory": int(share * machine.host_memory)}
    if not machine.cpu:
        less = {"device": replace(machine.device, memory=int(share * machine.device.memory))}
    machine = replace(machine, **less)
    plan = make_plan(Run(engine=engine), job, machine)
    assert plan.fits or not any(fits(job, machine, run) for run in runs(job, machine, engine))
    assert plan.fits == fits(plan.job, machine, plan.run)


def test_a_copy_of_merged_weights_that_would_stay_is_kept_out_by_a_larger_cache() -> None:
    """Adapters on a device whose memory cannot be lent: with the least KV cache there is room for the copy, and then none for an
    update beside it."""
    shape = qwen("qwen2.5-0.5b").shape
    job = qwen("qwen2.5-0.5b", rank=16, adapters=shape.lora_parameters(16), completion=8000, fused=False)
    machine = replace(h(3.5), host_memory=8 * GIB)
    machine = replace(machine, device=replace(machine.device, lends=False))
    plan = make_plan(Run(engine="native"), job, machine)
    assert plan.fits and MERGED not in plan.ledger["update"].device
    least = least_kv_bytes(job, plan.run, 1, plan.run.rollout.page_tokens)
    assert not make_plan(Run(engine="native", rollout=Rollout(kv_memory=least)), job, machine).fits


def test_a_70b_on_48_devices_gets_the_cache_that_fits() -> None:
    """The engine holds its KV cache while new weights are handed over, and an eighth of the weights on each device. They
    are handed over through host memory, which has a copy; an export takes another."""
    job = qwen(
        "llama-3.1-70b", prompts=128, samples=8, longest_prompt=512, typical_prompt=512, completion=1024, reference=True,
        compared=True, tiled_head=False,
    )  # fmt: skip
    machine = Machine(find_device("a100-80"), 48, 512 * GIB, 16)
    plan, by_hand = place_over(Run(), job, machine), place_over(Run(rollout=Rollout(kv_memory=4 * GIB)), job, machine)
    assert plan.fits and by_hand.fits and plan.times.total <= by_hand.times.total
    assert plan.run.rollout.kv_memory > 4 * GIB and plan.run.rollout.tensor_parallel == 8


def test_fused_layers_give_way_where_only_the_models_own_modules_fit() -> None:
    """These keep a layer's input in half precision: without host memory to put activations in, that decides."""
    adapters = qwen("qwen2.5-0.5b").shape.lora_parameters(16)
    long = {"longest_prompt": 30_000, "typical_prompt": 30_000, "completion": 30_000}
    job = qwen("qwen2.5-0.5b", prompts=1, samples=1, rank=16, adapters=adapters, **long)
    short = replace(h(140), host_memory=8 * GIB)

    def least(job: Job, kernels: str) -> int:
        """GiB of the smallest device that holds it."""
        run = Run(engine="native", kernels=kernels)
        return next(gib for gib in range(4, 40) if make_plan(run, job, with_memory(short, gib * GIB)).fits)

    plain, native = least(replace(job, fused=False), "plain"), least(job, "native")
    assert plain < native
    plan = make_plan(Run(engine="native"), job, with_memory(short, plain * GIB))
    assert plan.fits and plan.run.kernels == "plain" and not plan.job.fused
    assert [c.why for c in plan.choices if c.key == "run.kernels"] == ["fused layers do not fit"]
    assert make_plan(Run(engine="native"), job, with_memory(short, native * GIB)).run.kernels == "native"


def test_fewer_reward_workers_are_named_where_they_would_fit() -> None:
    """They run before there is a plan, so a plan cannot choose them."""
    job, machine = qwen(), replace(h(80), cores=8)
    host = make_plan(Run(reward_workers=1), job, machine).ledger.fullest_host.host_bytes
    short = replace(machine, host_memory=math.ceil(host / 0.9) + 2)
    plan = make_plan(Run(), job, short)
    assert not plan.fits and "run.reward_workers: 1" in str(refuse(plan, Run(), "balanced"))


def test_more_devices_are_a_remedy_and_an_offer() -> None:
    job = qwen("qwen2.5-7b")
    for machine in (h(24), replace(h(24), devices=2)):
        words = [change for change, _ in changes_that_fit(job, machine, Run(), "balanced")]
        assert any(change.endswith(" devices") for change in words)
    pinned = [change for change, _ in changes_that_fit(job, h(40), Run(devices=1), "balanced")]
    assert any(change.startswith("run.devices: ") for change in pinned)
    roomy = place_over(Run(), qwen(), h(80))
    assert [offer.words for offer in offers(roomy, Run(), "balanced")][-1] == "twice as many devices"
    assert all("devices" not in offer.words for offer in offers(roomy, Run(devices=1), "balanced"))


def test_run_memory_is_the_memory_there_is() -> None:
    for limit in (16, 24, 40):
        run, job = Run(memory=limit * GIB), qwen("qwen2.5-1.5b")
        limited, small = make_plan(run, job, h(140)), make_plan(Run(), job, h(limit))
        assert limited.limits == small.limits and limited.ledger == small.ledger
        assert make_plan(run, job, h(12)).limits == make_plan(Run(), job, h(12)).limits  # the device has less
    with pytest.raises(ConfigError, match=r"24\.0 GiB, which is run\.memory; .* run\.memory: 80GiB"):
        plan_here(Run(memory=24 * GIB), qwen("qwen2.5-7b"), h(140))


def test_run_memory_bounds_the_host_of_a_cpu_and_is_refused_there_too() -> None:
    cpu = Machine(nearest("CPU", 64 * GIB), 1, 64 * GIB, 2, cpu=True)
    job = qwen(itemsize=4, fused=False, tiled_head=False)
    assert plan_here(Run(memory=16 * GIB), job, cpu).limits.host == int(0.9 * 16 * GIB)
    assert not plan_here(Run(), job, replace(cpu, host_memory=GIB)).fits  # which may be swapped
    with pytest.raises(ConfigError, match=r"which is run\.memory"):
        plan_here(Run(memory=GIB), job, cpu)


@pytest.mark.parametrize(("memory", "before", "share"), [(40, 1.0, 0.25), (40, 0.1, 0.1), (1000, 1.0, 1.0)])
def test_the_allocator_gets_run_memory_less_the_drivers_part(memory: int, before: float, share: float) -> None:
    total = 160 * GIB
    assert allocator_share(memory * GIB + CUDA_CONTEXT_BYTES, total, before) == pytest.approx(share)
    assert allocator_share(CUDA_CONTEXT_BYTES // 2, total) == 0


@pytest.mark.parametrize("limit", [None, 8 * GIB])
def test_a_model_that_runs_out_of_memory_while_it_is_loaded_is_told_the_limit(limit: int | None) -> None:
    def load(size: int) -> None:
        raise torch.OutOfMemoryError(f"tried to allocate {size}")

    named = "within run.memory, 8.0 GiB .* Raise run.memory" if limit else "on the device .tried"
    with pytest.raises(MemoryExhausted, match=named):
        load_within(Run(memory=limit), torch.device("cpu"), load, 7)
    assert load_within(Run(), torch.device("cpu"), str, 7) == "7"


def test_fused_layers_are_left_where_the_plan_says_so() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    policy = Policy(AutoModelForCausalLM.from_config(config), check=False)
    policy.fused_forward = object()  # type: ignore[assignment]
    plan = make_plan(Run(), qwen(), h(140))
    use_planned_kernels(plan, policy, None)
    assert policy.fused
    use_planned_kernels(replace(plan, run=plan.run.model_copy(update={"kernels": "plain"})), policy, None)
    assert not policy.fused and policy.description == "the model's own modules"


def test_a_run_keeps_to_run_memory(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans with it, holds the allocator to it, and refuses what does not fit."""
    entered: list[int | None] = []

    @contextmanager
    def noted(run: Run, device: torch.device) -> Iterator[None]:
        entered.append(run.memory)
        try:
            yield
        finally:
            entered.append(None)

    monkeypatch.setattr("trimtab.run.ray_hosts.memory_limit", noted)
    with pytest.raises(ConfigError, match=r"of host memory, and the limit is 0\.5 GiB .* which is run\.memory"):
        step(model_folder, tmp_path, "memory", "512MiB")
    assert entered == [GIB // 2, None]
