"""What merging adapters into a copy of the weights takes for a moment: as the plan counts it, and as the engine allocates it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.plan.live import Live
from tests.plan.test_planner import h, qwen
from trimtab.config.run import Rollout, Run
from trimtab.model.parts import Adapter, Linears
from trimtab.model.weights import WeightStore
from trimtab.plan import ledger
from trimtab.plan.job import Job
from trimtab.plan.ledger import MERGED, MERGING, MIB, merging_bytes
from trimtab.plan.planner import make_plan
from trimtab.plan.shape import Block, ModelShape
from trimtab.rollout.native import fused


def small(rank: int = 16, **changes: int) -> Job:
    """The model of bench/tiny_memory.py: 2 layers under a large vocabulary."""
    hidden, width, heads, kv_heads, size = 1408, 3840, 22, 2, 64
    count = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * width
    shape = ModelShape("qwen2", hidden, 50_021, False, (Block(heads, kv_heads, size, size, width, count, count),) * 2)
    job = Job(shape, 2, 4, 4, 16, 16, 64, rank=rank, adapters=shape.lora_parameters(rank))
    return replace(job, **changes)


def test_the_plan_and_the_engine_merge_pieces_of_the_same_size() -> None:
    assert ledger.MERGE_CHUNK_ELEMENTS == fused.MERGE_CHUNK_ELEMENTS


@pytest.mark.parametrize("at_once", [2**23, 128 * 100, 7])
def test_merging_takes_what_is_counted(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of a layer through the engine's own code: gate and up are of one product and have an adapter each."""
    monkeypatch.setattr("trimtab.rollout.native.fused.MERGE_CHUNK_ELEMENTS", at_once)
    monkeypatch.setattr(ledger, "MERGE_CHUNK_ELEMENTS", at_once)
    hidden, width, rank = 128, 384, 16
    count = 4 * hidden * hidden + 3 * hidden * width
    shape = ModelShape("llama", hidden, 100, False, (Block(2, 2, 64, 64, width, count, count),))
    job = Job(shape, 2, 4, 4, 16, 16, 64, rank=rank, adapters=shape.lora_parameters(rank))

    def product(inputs: int, outputs: list[int]) -> fused.Product:
        names = ["q_proj", "k_proj", "v_proj"] if len(outputs) == 3 else ["gate_proj", "up_proj"][: len(outputs)]
        weights = [torch.nn.Parameter(torch.zeros(n, inputs, dtype=torch.bfloat16)) for n in outputs]
        store = WeightStore((f"{name}.weight", weight) for name, weight in zip(names, weights))
        adapters, start = [], 0
        for n in outputs:
            a, b = torch.nn.Linear(inputs, rank, bias=False), torch.nn.Linear(rank, n, bias=False)
            adapters.append(Adapter(a, b, 0.5, start, start + n))
            start += n
        found = fused.Product(Linears(store, weights, None, adapters))
        found.make_room(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        return found

    peaks = []
    for made in (product(hidden, [hidden] * 3), product(hidden, [width] * 2), product(width, [hidden])):
        known = [made.weight, made._merged, *(t for a in made.adapters for t in (a.a.weight, a.b.weight))]
        with Live(known) as live:
            made.refresh()
        peaks.append(live.peak)
    assert merging_bytes(job) <= max(peaks) <= merging_bytes(job) + 4 * 512  # whole blocks


def test_merging_is_counted_where_adapters_are_merged_and_prompts_take_less() -> None:
    plan = make_plan(Run(engine="native"), small(), h(140))
    parts = plan.ledger["rollout"].device
    assert parts[MERGED] > 0
    assert merging_bytes(small()) == 4 * 3840 * (2 * 1408 + 16)
    assert parts[MERGING] == merging_bytes(small()) - parts["prefill"]
    assert all(MERGING not in phase.device for phase in plan.ledger.phases if phase.name != "rollout")
    long = make_plan(Run(engine="native"), small(prompts=512, longest_prompt=512, typical_prompt=512), h(140))
    assert long.ledger["rollout"].device["prefill"] > merging_bytes(small())
    assert MERGED in long.ledger["rollout"].device and MERGING not in long.ledger["rollout"].device
    whole = make_plan(Run(engine="native"), qwen("qwen2.5-0.5b"), h(140))
    assert MERGING not in whole.ledger["rollout"].device


def test_what_merging_takes_refuses_nothing() -> None:
    """There is a copy only where there is room for two: without it, nothing is merged."""
    plan = make_plan(Run(engine="native", rollout=Rollout(kv_memory=64 * MIB)), small(), h(140))
    phase = plan.ledger["rollout"]
    assert phase.device_bytes - phase.required_bytes == phase.device[MERGED] + phase.device[MERGING] > 0
