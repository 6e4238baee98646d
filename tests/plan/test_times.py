"""The time model gives back what was measured on an H200 (docs/log.md) to within a third, and orders plans as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from trimtab.config.run import Offload, Rollout, Run
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import GIB
from trimtab.plan.placement import SINGLE_DEVICE
from trimtab.plan.planner import make_plan
from trimtab.plan.shape import read_shape
from trimtab.plan.source import WELL_KNOWN
from trimtab.plan.times import (
    OUTSIDE_DEVICE,
    OUTSIDE_HOST,
    OUTSIDE_PUBLISH,
    OUTSIDE_TURN,
    _Clock,
    outside_step,
    predict,
)

NOTHING = Offload(optimizer=False, reference=False, activations=False)
H200 = Machine(find_device("h200"), 1, 128 * GIB, 16)


def work(name: str, **settings) -> Job:
    usual = {
        "itemsize": 2,
        "prompts": 128,
        "samples": 8,
        "longest_prompt": 128,
        "typical_prompt": 128,
        "completion": 512,
    }
    return Job(read_shape(WELL_KNOWN[name]), **usual | settings)


@pytest.mark.parametrize(("name", "tokens_per_s"), [("qwen2.5-0.5b", 268_000), ("qwen2.5-1.5b", 113_000)])
def test_rollout_of_equal_lengths(name: str, tokens_per_s: int) -> None:
    """Workload R: 128 x 8 samples of 512 tokens."""
    job = work(name)
    found = 1024 * 512 / make_plan(Run(), job, H200).times.rollout
    assert 0.67 < found / tokens_per_s < 1.5


@pytest.mark.parametrize(
    ("name", "tokens_per_s"), [("smollm2-135m", 352_000), ("qwen2.5-0.5b", 146_000), ("qwen2.5-1.5b", 56_000)]
)
def test_an_update_of_32k_tokens(name: str, tokens_per_s: int) -> None:
    """Workload U: forward and backward of one packed row of 32k tokens."""
    job = work(name, prompts=64, samples=1, longest_prompt=256, typical_prompt=256, completion=257)
    plan = make_plan(Run(token_budget=32768), job, H200)
    assert 0.67 < job.step_row.tokens / plan.times.update / tokens_per_s < 1.5


def test_what_saves_memory_costs_time() -> None:
    job = work("qwen2.5-1.5b", prompts=16)
    run = make_plan(Run(checkpoint_activations=False, offload=NOTHING), job, H200).run
    base = predict(job, H200, run).update
    for kept in ("some", True):
        assert predict(job, H200, run.model_copy(update={"checkpoint_activations": kept})).update > base
    away = NOTHING.model_copy(update={"optimizer": True})
    assert predict(job, H200, run.model_copy(update={"offload": away})).update > base


def test_longer_completions_and_slower_devices_take_longer() -> None:
    slow = Machine(find_device("a100-80"), 1, 128 * GIB, 16)
    fast, slower = (make_plan(Run(), work("qwen2.5-0.5b"), machine).times for machine in (H200, slow))
    assert slower.rollout > fast.rollout and slower.update > fast.update
    longer = make_plan(Run(), work("qwen2.5-0.5b", completion=1024), H200).times
    assert longer.rollout > 1.8 * fast.rollout
    seen = make_plan(Run(), work("qwen2.5-0.5b", completion=1024, lengths=(100.0, 200.0, 250.0, 1024.0)), H200).times
    assert seen.rollout < longer.rollout


def test_a_reference_takes_a_pass_and_a_host_link_takes_longer() -> None:
    job = work("qwen2.5-1.5b", reference=True, compared=True)
    plan = make_plan(Run(), job, H200)
    assert plan.times.score > 0
    waits = plan.run.model_copy(update={"offload": NOTHING.model_copy(update={"reference": True})})
    away = predict(job, H200, waits)
    assert away.score > plan.times.score
    assert make_plan(Run(), replace(job, reference=False, compared=False), H200).times.score == 0


@pytest.mark.parametrize(
    ("engine", "name", "sequences", "measured"),
    [
        ("vllm", "qwen2.5-0.5b", 8, 3276),
        ("vllm", "qwen2.5-0.5b", 64, 15325),
        ("vllm", "qwen2.5-0.5b", 512, (23665, 38795)),
        ("vllm", "qwen2.5-7b", 8, 1272),
        ("vllm", "qwen2.5-7b", 64, 7649),
        ("vllm", "qwen2.5-7b", 512, 15932),
        ("sglang", "qwen2.5-0.5b", 8, 2545),
        ("sglang", "qwen2.5-0.5b", 64, 17554),
        ("sglang", "qwen2.5-0.5b", 512, 46048),
    ],
)
def test_one_process_of_another_engine_is_as_fast_as_it_was_measured(
    engine: Literal["vllm", "sglang"], name: str, sequences: int, measured: int | tuple[int, int]
) -> None:
    """128 + 128 tokens (bench/results/engines-2026-11-16.md); of two hosts, what lies between them."""
    job = Job(read_shape(WELL_KNOWN[name]), 2, sequences // 8, 8, 128, 128, 128)
    plan = make_plan(Run(engine=engine, rollout=Rollout(processes=1)), job, H200)
    least, most = measured if isinstance(measured, tuple) else (0.8 * measured, 1.25 * measured)
    assert least < 128 * sequences / plan.times.rollout < most


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("name", "count", "bound"),
    [("qwen2.5-0.5b", 1, "host"), ("qwen2.5-0.5b", 2, "host"), ("llama-3.1-70b", 2, "device")],
)
def test_processes_take_turns_on_the_device_while_others_are_busy_on_their_hosts(
    engine: Literal["vllm", "sglang"], name: str, count: int, bound: str
) -> None:
    job, run = work(name), Run(engine=engine)
    step_s, sequence_s = OUTSIDE_HOST[engine]
    device_s = _Clock(job, H200, run, SINGLE_DEVICE).device_step(512 / count, 384)
    device_s += OUTSIDE_TURN if count > 1 else OUTSIDE_DEVICE
    wanted = {"device": count * device_s, "host": device_s + step_s + sequence_s * 512 / count}
    assert max(wanted, key=lambda which: wanted[which]) == bound
    assert outside_step(job, H200, run, count, 512, 384) == pytest.approx(wanted[bound])


@pytest.mark.parametrize(("processes", "measured"), [(4, 5.04), (5, 6.18)])
def test_several_processes_of_a_small_model_take_what_was_measured(processes: int, measured: float) -> None:
    """512 sequences of at most 512 tokens, on two hosts (bench/results/grpo_step*-2026-11-16.md)."""
    job = Job(read_shape(WELL_KNOWN["smollm2-135m"]), 2, 32, 16, 512, 150, 512)
    found = make_plan(Run(engine="vllm", rollout=Rollout(processes=processes)), job, H200).times.rollout
    assert found == pytest.approx(measured, rel=0.1)


def test_an_engine_outside_has_layers_of_its_own() -> None:
    """Which the model's own modules are not."""
    plain, fused = (
        make_plan(Run(engine="vllm"), work("qwen2.5-0.5b", fused=fused), H200).times.rollout for fused in (False, True)
    )
    assert plain == fused


def test_experts_go_to_an_engine_outside_by_way_of_the_host() -> None:
    """So their link is what publishing waits for."""
    dense = work("qwen2.5-1.5b")
    blocks = tuple(replace(block, experts=8) for block in dense.shape.blocks)
    job = replace(dense, shape=replace(dense.shape, blocks=blocks))
    assert job.shape.has_experts and not dense.shape.has_experts
    run = make_plan(Run(engine="vllm", rollout=Rollout(processes=1)), dense, H200).run
    moved = 2 * job.shape.parameters * job.itemsize / H200.device.host_link
    assert predict(job, H200, run).publish == pytest.approx(moved + OUTSIDE_PUBLISH)
    assert predict(dense, H200, run).publish < predict(job, H200, run).publish
