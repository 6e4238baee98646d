"""Bytes of a micro-batch of the update, corrected by what was measured, for the ledger."""

from __future__ import annotations

from dataclasses import replace

from trimtab.base.units import MIB
from trimtab.plan.activations import MicroBatchSize, UpdatePath, update_peak
from trimtab.plan.job import NO_CORRECTION, Job

ROUNDING_BYTES_PER_TENSOR = MIB // 4
"""Lost on average by a large tensor: torch's allocator hands out a block that is up to 1 MiB larger."""


def critic_path(path: UpdatePath) -> UpdatePath:
    """The critic's head gives one number a token: it needs no logits."""
    return replace(path, chunk=1, tiled_head=True)


def update_work(job: Job, row: MicroBatchSize, path: UpdatePath) -> dict[str, int]:
    """Bytes by component as `update_peak` counts them, corrected by what was measured."""
    found = {name: int(job.correction.factor * size) for name, size in update_peak(job.shape, row, path).items()}
    found["activations"] = max(0, found["activations"] + job.correction.rest)
    return found


def rounding_bytes(job: Job, path: UpdatePath) -> int:
    """What the allocator's rounding adds to the tensors that layers keep; once measured, it is in the correction."""
    if job.correction != NO_CORRECTION:
        return 0
    tensors = {False: 9, "some": 7, True: 1}[path.recompute]
    return ROUNDING_BYTES_PER_TENSOR * tensors * job.shape.layers
