"""Plans for mixtures by the values of their own configs (tests/plan/configs), on cards of 24 to 141 GB."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.base.units import GIB
from trimtab.config.run import Run
from trimtab.model.sizes import FUSED_FAMILIES
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.planner import make_plan
from trimtab.plan.shape import ModelShape, read_shape
from trimtab.plan.times import predict

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
PUBLISHED = {
    "qwen3-30b-a3b": (30.53, 3.35),
    "olmoe-1b-7b": (6.92, 1.28),
    "gpt-oss-20b": (20.91, 3.61),
    "deepseek-v2-lite": (15.71, 2.66),
    "glm-4.5-air": (106.85, 13.42),
}
"""Billions of parameters: all, and those that a token uses (both tables counted, but for gpt-oss)."""


def shape(name: str) -> ModelShape:
    return read_shape(json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text()))


def job(name: str, targets: list[str] | None = ATTENTION) -> Job:
    model = shape(name)
    return Job(
        model, itemsize=2, prompts=32, samples=8, longest_prompt=512, typical_prompt=512, completion=1024, rank=16,
        adapters=model.lora_parameters(16, targets), fused=model.kind in FUSED_FAMILIES, tiled_head=True,
    )  # fmt: skip


def machine(device: str) -> Machine:
    return Machine(find_device(device), 1, 200 * GIB, 16)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    model = shape(name)
    tables = 0 if name == "gpt-oss-20b" else model.table
    assert model.parameters == pytest.approx(total * 1e9, rel=2e-3)
    assert model.active_parameters + tables == pytest.approx(active * 1e9, rel=2e-2)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("olmoe-1b-7b", ["rtx4090", "a100-40", "h100", "h200"]),
        ("deepseek-v2-lite", ["a100-40", "h100", "h200"]),
        ("gpt-oss-20b", ["h100", "h200"]),
        ("qwen3-30b-a3b", ["h100", "h200"]),
        ("glm-4.5-air", []),
    ],
)
def test_adapters_on_attention_fit_where_the_weights_do(name: str, fits: list[str]) -> None:
    for device in ("rtx4090", "a100-40", "h100", "h200"):
        plan = make_plan(Run(), job(name), machine(device))
        assert plan.fits == (device in fits), device
        if plan.fits:
            assert plan.ledger.fullest.device_bytes <= machine(device).device.memory
            assert 0 < plan.times.update < plan.times.total < 1000


def test_adapters_on_experts_cost_what_they_are() -> None:
    """128 experts of 48 layers have 128 times the adapters of a layer of their size."""
    model = shape("qwen3-30b-a3b")
    experts = 48 * 128 * 16 * ((2048 + 1536) + (768 + 2048))
    assert model.lora_parameters(16, ["gate_up_proj", "down_proj"]) == experts
    assert model.lora_parameters(16) == experts + model.lora_parameters(16, ATTENTION)
    narrow, wide = (make_plan(Run(), job("qwen3-30b-a3b", targets), machine("h200")) for targets in (ATTENTION, None))
    assert narrow.fits and wide.fits
    more = wide.ledger["update"].device["adapters"] - narrow.ledger["update"].device["adapters"]
    assert more == 4 * experts


def test_a_small_batch_reads_few_experts_and_a_large_one_all() -> None:
    model = shape("qwen3-30b-a3b")
    one, many = model.parameters_read(1), model.parameters_read(4096)
    assert one == pytest.approx(model.active_parameters, rel=1e-9)
    assert many == pytest.approx(model.parameters - model.table, rel=1e-3)
    assert one < model.parameters_read(8) < 8 * one
    dense = replace(model.blocks[0], experts=0, experts_used=0)
    assert dense.experts_read(1) == 1.0


def test_experts_take_longer_than_a_dense_model_of_as_many_active_parameters() -> None:
    """Tokens are laid out for each of their experts, and small products leave tiles empty."""
    work = job("qwen3-30b-a3b")
    plan = make_plan(Run(), work, machine("h200"))
    model = work.shape
    dense = tuple(
        replace(b, experts=0, experts_used=0, width=b.used_width, parameters=b.active, active=b.active)
        for b in model.blocks
    )
    twin = predict(replace(work, shape=replace(model, blocks=dense)), machine("h200"), plan.run)
    assert 1.05 * twin.update < plan.times.update < 2 * twin.update
    assert twin.rollout < plan.times.rollout
