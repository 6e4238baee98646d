"""No KV cache that somebody pins makes a step faster than the one that is chosen, in the same share of the memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.plan.test_planner import h, qwen
from trimtab.config.run import Rollout, Run
from trimtab.plan.devices import find_device, nearest, of_size
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import GIB
from trimtab.plan.place import place_over
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.refusal import widest
from trimtab.plan.report import as_recorded, offers

LARGE = partial(
    qwen, "llama-3.1-70b", prompts=128, samples=8, longest_prompt=512, typical_prompt=512, completion=1024, reference=True,
    compared=True, tiled_head=False,
)  # fmt: skip
A100S = Machine(find_device("a100-80"), 48, 512 * GIB, 16)


def adapted(name: str, **settings: Any) -> Job:
    return qwen(name, rank=16, adapters=qwen(name).shape.lora_parameters(16), **settings)


def unlent(memory: float, host: int = 256) -> Machine:
    """A device whose memory cannot be lent: KV cache and micro-batches share it."""
    return Machine(replace(of_size(int(memory * GIB)), lends=False), 1, host * GIB, 8)


WORK = {"prompts": 128, "samples": 8, "completion": 1024}
CASES: dict[str, tuple[Job, Machine, str]] = {
    "70B on 48 devices": (LARGE(), A100S, "auto"),
    "0.5B, lent": (qwen(**WORK, reference=True, compared=True), h(16), "native"),
    "1.5B, not lent": (qwen("qwen2.5-1.5b", **WORK, reference=True, compared=True), unlent(40), "native"),
    "3B, adapters, a merged copy would stay": (
        adapted("qwen2.5-3b", prompts=256, samples=16, longest_prompt=512, typical_prompt=512, completion=4000),
        unlent(22.8, 36), "native",
    ),
    "0.5B, not lent, processes of vLLM": (
        qwen(prompts=64, samples=16, longest_prompt=64, typical_prompt=64, completion=1024, reference=True, compared=True),
        unlent(16), "vllm",
    ),
    "1.5B, adapters, vLLM on a CPU": (
        adapted(
            "qwen2.5-1.5b", itemsize=4, fused=False, tiled_head=False, compared=True, prompts=256, samples=4, longest_prompt=512,
            typical_prompt=512, completion=1024,
        ),
        Machine(nearest("CPU", 64 * GIB), 1, 33 * GIB, 8, cpu=True), "vllm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("profile", ["balanced", "max"])
@pytest.mark.parametrize("case", CASES)
def test_a_pinned_cache_is_not_faster(case: str, profile: str) -> None:
    job, machine, engine = CASES[case]

    def plan(kv: Any) -> Plan:
        return place_over(Run(engine=engine, rollout=Rollout(kv_memory=kv)), job, machine, profile)

    chosen = plan("auto")
    pinned = [plan(int(gib * GIB)) for gib in (1, 4, 8, 16)]
    fitting = [found.times.total for found in pinned if found.fits]
    assert chosen.fits and fitting and chosen.times.total <= 1.02 * min(fitting)


def test_a_fuller_profile_is_offered_where_it_is_faster() -> None:
    """1.5B on 14 GiB that cannot be lent: a KV cache of 1.2 GiB does not fit into nine tenths of the memory: a run that pins it
    fills more."""
    job, machine = CASES["1.5B, not lent"][0], unlent(14)
    run = Run(engine="native", rollout=Rollout(kv_memory=int(1.2 * GIB)))
    assert not place_over(run, job, machine, "balanced").fits
    by_hand, profile = widest(run, job, machine, "balanced")
    chosen = place_over(Run(), job, machine, "balanced")
    assert profile == "max" and by_hand.fits and by_hand.times.total < chosen.times.total
    first = offers(chosen, Run(), "balanced")[0]
    assert first.words == "run.profile: max, which fills 96 %" and first.seconds <= by_hand.times.total
    assert all("profile" not in offer.words for offer in offers(place_over(Run(), job, machine, "max"), Run(), "max"))
    roomy = make_plan(Run(), qwen(), h(140))
    assert all("profile" not in offer.words for offer in offers(roomy, Run(), "balanced"))


def test_a_recorded_plan_names_its_profile_lengths_and_offers() -> None:
    roomy = make_plan(Run(), qwen(), h(140))
    found = as_recorded(roomy, Run())
    assert found["profile"] == "balanced" and found["fits"]
    assert found["assumed_lengths"]["completion_limit"] == roomy.job.completion
    assert [offer["text"] for offer in found["offers"]] == [offer.words for offer in offers(roomy, Run(), "balanced")]
    filled = place_over(Run(), LARGE(), A100S, "max")
    assert as_recorded(filled, Run())["profile"] == "max"
