"""Predicted peaks of what really ran, beside what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.config.run import Run
from trimtab.plan.activations import MicroBatchSize, UpdatePath, update_peak
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import CUBLAS_WORKSPACES_BYTES, GIB
from trimtab.plan.planner import make_plan
from trimtab.plan.shape import read_shape
from trimtab.plan.source import WELL_KNOWN
from trimtab.plan.update_work import ROUNDING_BYTES_PER_TENSOR
from trimtab.plan.watch import PlanWatch


def watching(rank: int = 0) -> PlanWatch:
    shape = read_shape(WELL_KNOWN["smollm2-135m"])
    job = Job(shape, 2, 32, 16, 256, 256, 512, rank=rank, adapters=shape.lora_parameters(rank) if rank else 0)
    return PlanWatch(make_plan(Run(), job, Machine(find_device("h200"), 1, 64 * GIB, 16)))


def test_the_first_micro_batch_has_the_heads_gradient_and_later_ones_all() -> None:
    watch, sizes = watching(), (16384, 14000, 30000, 40, 9_000_000)
    shape = watch.plan.job.shape
    work = sum(update_peak(shape, MicroBatchSize(*sizes), UpdatePath(2, True, False, 4096, True)).values())
    watch.saw([sizes], False, 4096, False)
    states = 14 * shape.parameters + CUBLAS_WORKSPACES_BYTES + 9 * shape.layers * ROUNDING_BYTES_PER_TENSOR
    assert watch.update_bytes([sizes]) == states + work + 4 * shape.table
    assert watch.update_bytes([sizes, sizes]) == states + work + 4 * shape.parameters
    small = (64, 32, 64, 2, 2000)
    # Gradients are more than so few tokens keep; the embedding's comes last, and once more, in the model's type.
    assert watch.update_bytes([small]) == states + 4 * shape.parameters + 2 * shape.table
    assert watch.update_bytes([small, small]) == states + 4 * shape.parameters + 2 * shape.table


def test_a_plan_of_few_tokens_counts_the_embeddings_gradient() -> None:
    """On an H200 0.13 GiB of 3.37 were, with hidden size 1,408, a vocabulary of 50,021 and 4 x 4 x 64 tokens."""
    config = WELL_KNOWN["smollm2-135m"] | {"hidden_size": 1408, "vocab_size": 200_000, "num_hidden_layers": 2}
    job = Job(read_shape(config), 2, 1, 1, 8, 8, 8, fused=True, tiled_head=True)
    plan = make_plan(Run(), job, Machine(find_device("h200"), 1, 64 * GIB, 16))
    assert plan.ledger["update"].device["embedding gradient"] == 2 * job.shape.table
    adapted = replace(job, rank=8, adapters=job.shape.lora_parameters(8))
    plan = make_plan(Run(), adapted, Machine(find_device("h200"), 1, 64 * GIB, 16))
    assert not plan.ledger["update"].device.get("embedding gradient")


def test_adapters_have_gradients_of_their_own_alone() -> None:
    watch, sizes = watching(rank=16), (16384, 14000, 16384, 40, 0)
    watch.saw([sizes], True, 4096, False)
    job = watch.plan.job
    work = sum(update_peak(job.shape, MicroBatchSize(*sizes), UpdatePath(2, True, True, 4096, True, 16)).values())
    assert (
        watch.update_bytes([sizes, sizes])
        == 2 * job.shape.parameters
        + 4 * job.adapters
        + 8 * job.adapters
        + work
        + 4 * job.adapters
        + CUBLAS_WORKSPACES_BYTES
        + job.shape.layers * ROUNDING_BYTES_PER_TENSOR
    )


def test_a_step_is_compared_with_what_was_measured() -> None:
    watch, sizes = watching(), (32768, 30000, 60000, 70, 0)
    watch.saw([sizes, (100, 50, 100, 2, 0)], False, 4096, False)
    predicted = watch.update_bytes([sizes]) / GIB
    metrics = watch.end_step({"memory/update_peak_gib": 2 * predicted, "memory/rollout_peak_gib": 3.0})
    assert metrics["memory/predicted_over_measured"] == pytest.approx(0.5, rel=0.05)
    assert metrics["memory/rollout_predicted_gib"] == watch.plan.ledger["rollout"].allocated / GIB
    assert watch.end_step({"memory/update_peak_gib": 1.0}) == {}  # no update since
    assert watch.end_step({}) == {}


def test_what_was_lowered_since_counts() -> None:
    watch, sizes = watching(), (16384, 14000, 16384, 40, 0)
    watch.saw([sizes], False, 4096, False)
    kept = watch.update_bytes([sizes])
    watch.saw([sizes], True, 128, False)
    assert watch.update_bytes([sizes]) < kept


@pytest.mark.parametrize(("rank", "factor"), [(0, 6), (16, 4)])
def test_use_is_products_over_what_the_device_could_have_done(rank: int, factor: int) -> None:
    """SmolLM2-135M by hand: 106,203,456 parameters of layers and the last norm, a table of 49,152 x 576."""
    watch = watching(rank=rank)
    assert watch.used(1.0) == {}, "nothing ran yet"
    for _ in range(2):
        watch.saw([(1000, 800, 1000, 5, 0), (500, 100, 500, 5, 0)], False, 4096, False)
    watch.end_step({})
    operations = 2 * factor * (106_203_456 * 1500 + 49_152 * 576 * 900)
    assert watch.used(0.5)["throughput/update_mfu"] == pytest.approx(operations / 0.5 / 989e12, rel=1e-3)
    assert watch.used(0.0) == {}
