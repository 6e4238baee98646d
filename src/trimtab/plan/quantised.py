"""Bytes of weights that lie in codes under adapters (`model.base`), exactly as model/codes.py lays them out."""

from __future__ import annotations

from trimtab.base.errors import ConfigError, Problem
from trimtab.model.sizes import FOUR_BIT_BLOCK, FP8_BLOCK, MAX_QUANTISED_ELEMENTS
from trimtab.plan.job import Job
from trimtab.plan.shape import ModelShape

LEVELS_BYTES = 16 * 4
"""Of the levels that four bits stand for."""
QUANTISING_BYTES = 32
"""Of what exists for each element that is being put into codes."""
HOST_DEQUANTISING_BYTES = 16
"""Of what exists beside the result for each element of a matrix that is made from codes, where no kernel does it."""


def codes_bytes(inputs: int, outputs: int, kind: str) -> int:
    """Of one matrix: codes, scales and levels."""
    if kind == "fp8":
        return inputs * outputs + 4 * -(-outputs // FP8_BLOCK) * -(-inputs // FP8_BLOCK)
    return -(-inputs * outputs // 2) + 4 * -(-inputs * outputs // FOUR_BIT_BLOCK) + LEVELS_BYTES


def weight_bytes(job: Job, shape: ModelShape | None = None) -> int:
    """Bytes of a model's weights as they are stored."""
    shape = shape or job.shape
    if not job.quantised:
        return shape.parameters * job.itemsize
    matrices = [(count, sizes) for block, count in shape.kinds.items() for sizes in shape.linears(block).values()]
    plain = shape.parameters - sum(count * inputs * outputs for count, (inputs, outputs) in matrices)
    return plain * job.itemsize + sum(count * codes_bytes(*sizes, job.base) for count, sizes in matrices)


def dequantised_matrix(job: Job, cpu: bool) -> dict[str, int]:
    """The largest matrix as it is multiplied: one exists at a time."""
    if not job.quantised:
        return {}
    each = job.itemsize + (HOST_DEQUANTISING_BYTES if cpu else 0)
    return {"dequantised matrix": each * _largest(job.shape)}


def quantising(job: Job) -> dict[str, int]:
    """What putting a matrix into codes takes, while a model is loaded."""
    if not job.quantised:
        return {}
    largest = _largest(job.shape)
    return {"quantising": job.itemsize * largest + QUANTISING_BYTES * min(largest, MAX_QUANTISED_ELEMENTS)}


def _largest(shape: ModelShape) -> int:
    return max(inputs * outputs for block in shape.kinds for inputs, outputs in shape.linears(block).values())


def has_other_layers(shape: ModelShape) -> bool:
    """Experts, latent attention or layers that carry a state: their weights are never kept in codes."""
    return shape.has_experts or _latent(shape) or shape.state_bytes(2) > 0


def refuse_base(base: str, shape: ModelShape) -> None:
    """Refuse weights in codes for layers that are not plain linear ones."""
    if base not in ("fp8", "4bit"):
        return
    other = "experts" if shape.has_experts else "layers with latent attention" if _latent(shape) else ""
    other = other or ("layers that carry a state" if shape.state_bytes(2) else "")
    if other:
        raise ConfigError(
            [Problem("model.base", f"is {base}, but {other} cannot be stored so", "Write model.base: bf16.")]
        )


def refuse_kv(kv_dtype: str, shape: ModelShape) -> None:
    """Refuse keys and values in codes where a latent is stored in their place."""
    if kv_dtype == "fp8" and _latent(shape):
        what = "is fp8, but this model's engine stores latents in place of keys and values, which have no codes"
        raise ConfigError([Problem("model.kv_dtype", what, "Write model.kv_dtype: auto.")])


def _latent(shape: ModelShape) -> bool:
    return any(block.latent for block in shape.kinds)
