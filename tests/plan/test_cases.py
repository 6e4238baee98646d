"""The cases that people worked out by hand, in the documents this project began with, planned from their own figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.config.run import Run
from trimtab.plan.activations import MicroBatchSize, UpdatePath, update_peak
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import kv_bytes
from trimtab.plan.ledger import GIB, MIB
from trimtab.plan.place import place_over
from trimtab.plan.planner import make_plan
from trimtab.plan.shape import Block, ModelShape, read_shape
from trimtab.plan.source import WELL_KNOWN


def nanochat() -> ModelShape:
    """16 layers of width 1,024, eight heads of 128, a feed-forward of four times the width without a gate."""
    block = Block(8, 8, 128, 128, 4096, 12 * 1024**2, 12 * 1024**2, gated=False)
    return ModelShape("nanochat", 1024, 65536, False, (block,) * 16)


def job(shape: ModelShape, **settings) -> Job:
    usual = {
        "itemsize": 2,
        "prompts": 32,
        "samples": 16,
        "longest_prompt": 256,
        "typical_prompt": 256,
        "completion": 256,
    }
    return Job(shape, **usual | {"fused": False, "tiled_head": False} | settings)


def known(name: str, **settings) -> Job:
    return job(read_shape(WELL_KNOWN[name]), **settings)


def test_a_cache_of_eight_sequences_is_256_mib_not_512() -> None:
    """16 layers x 2 x 8 sequences x 8 heads x 512 tokens x 128 x 2 bytes; the document says about 512 MB."""
    assert 8 * 512 * nanochat().kv_elements * 2 == 256 * MIB
    assert kv_bytes(job(nanochat()), 8, 512, 512) == 2 * 256 * MIB  # with the page more that a fork copies


def test_a_card_of_32_gb_that_was_8_percent_full_is_filled() -> None:
    """`device_batch_size` 4 used 2.6 of 32 GB; nobody had chosen it."""
    machine = Machine(find_device("rtx5090"), 1, 64 * GIB, 16)
    four = make_plan(Run(token_budget=4 * 512), job(nanochat()), machine, "max")
    plan = make_plan(Run(), job(nanochat()), machine, "max")
    assert plan.fits and plan.ledger.fullest.device_bytes >= 0.75 * machine.device.memory
    assert four.ledger["update"].device_bytes < 0.5 * plan.ledger["update"].device_bytes
    for profile in ("safe", "balanced", "max"):
        fuller = make_plan(Run(), job(nanochat()), machine, profile)
        assert fuller.fits and fuller.times.total <= four.times.total


def test_an_a100_of_40_gb_fits_what_ran_out_of_memory_without_touching_learn() -> None:
    """Four prompts of four samples, adapters of rank 16: the document cut lengths, samples and rank to make it fit."""
    shape = read_shape(WELL_KNOWN["qwen2.5-7b"])
    work = job(shape, prompts=4, samples=4, longest_prompt=1024, typical_prompt=1024, completion=128, rank=16,
               adapters=shape.lora_parameters(16), fused=True)  # fmt: skip
    plan = make_plan(Run(), work, Machine(find_device("a100-40"), 1, 64 * GIB, 8))
    assert plan.fits and plan.job == work
    assert plan.ledger.fullest.device_bytes < find_device("a100-40").memory


def test_eight_a100_hold_a_7b_with_everything_on_them() -> None:
    """The document's hybrid engine: rollout copies over two devices each, everything on the same eight."""
    machine = Machine(find_device("a100-80"), 8, 1000 * GIB, 64)
    plan = place_over(Run(), known("qwen2.5-7b", reference=True, compared=True, completion=1024, fused=True), machine)
    assert plan.fits and plan.place.devices == 8 and plan.place.shard == "optimizer" and plan.place.tensor == 1
    assert plan.ledger["update"].device["weights"] == pytest.approx(7.616e9 * 2, rel=1e-3)
    assert plan.ledger["update"].device["masters"] == pytest.approx(7.616e9 * 4 / 8, rel=1e-3)


def test_48_a100_hold_a_70b() -> None:
    machine = Machine(find_device("a100-80"), 48, 1000 * GIB, 64)
    plan = place_over(
        Run(), known("llama-3.1-70b", reference=True, compared=True, completion=1024, fused=True), machine
    )
    assert plan.fits and plan.place.shard == "full" and plan.place.shard_devices == 48 and plan.place.tensor >= 4
    one = place_over(Run(), known("llama-3.1-70b", fused=True), replace(machine, devices=8))
    assert not one.fits or one.times.total > plan.times.total


@pytest.mark.parametrize(
    ("name", "found"), [("qwen2.5-0.5b", 116), ("qwen2.5-1.5b", 128), ("qwen2.5-3b", 62), ("qwen2.5-7b", 100)]
)
def test_ceilings_found_by_hand_lie_in_the_predicted_band(name: str, found: int) -> None:
    """verl's GRPO scripts with adapters of rank 32 on one H100: samples of up to 512 + 1,024 tokens a micro-batch, by trying.

    That stack recomputes activations and has the logits of a micro-batch: at least their bfloat16 values, at most also a float32
    copy with its gradient. Samples have the full 1,536 tokens, or, as GSM8K's do, about 350.
    """
    shape = read_shape(WELL_KNOWN[name])

    def most(tokens: int, logit_bytes: int) -> int:
        budget = 0.9 * 79 * GIB - 2 * shape.parameters - 16 * shape.lora_parameters(32)
        row = MicroBatchSize(tokens, tokens, tokens, 1)
        kept = update_peak(shape, row, UpdatePath(2, False, True, 1, False, 32))["activations"]
        return int(budget / (kept + tokens * shape.vocabulary * logit_bytes))

    lowest, highest = most(1536, 10), most(350, 2)
    assert lowest <= found <= highest
    assert lowest >= 16  # what the 7B script is set to fits at any length
    own = known(name, prompts=64, samples=16, longest_prompt=512, typical_prompt=512, completion=1024, rank=32,
                adapters=shape.lora_parameters(32), fused=True, tiled_head=True)  # fmt: skip
    plan = make_plan(Run(checkpoint_activations=True), own, Machine(find_device("h100"), 1, 256 * GIB, 16), "max")
    assert plan.fits and plan.run.token_budget > found * 350
