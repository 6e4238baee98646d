"""Checkpoints whose weights are stored in fewer bits: what a config says of how, and the weights themselves in full width.

Served: MXFP4 (`NAME_blocks` and `NAME_scales`, as gpt-oss is published), FP8 with a scale for each block or for the whole matrix
(`weight_scale_inv`, as DeepSeek-V3 and Ministral 3 are), and compressed-tensors' `float-quantized` and `naive-quantized` (FP8
with `weight_scale`). Everything else is refused by name (schemes.py), before a weight is read.

Guarantee: a value is the product of what is stored and its scale, rounded once, to the type that was asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from trimtab.base.errors import ModelError
from trimtab.model.schemes import Scheme
from trimtab.model.sizes import READ_CHUNK_ELEMENTS

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What four bits mean (E2M1)."""
FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ("_scale_inv", "_scale")
"""How the name of a scale ends that is otherwise its weight's."""
IGNORED = (".activation_scale", ".input_scale", ".input_activation_scale", ".k_scale", ".v_scale", ".weight_shape")
"""Scales of activations: nothing is computed in eight bits here."""


@dataclass(frozen=True)
class StoredTensor:
    """A weight as a checkpoint stores it: its own tensor and its scales, by the names that they have there."""

    name: str
    """The weight's name in the model."""
    values: str
    scales: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)


def stored_tensors(names: Collection[str], scheme: Scheme | None) -> list[StoredTensor]:
    """The weights that these stored tensors make up, each with its scales."""
    there, found = set(names), []
    for name in sorted(there):
        if scheme is None:
            found.append(StoredTensor(name, name))
        elif scheme.method == "mxfp4":
            whole = name.removesuffix("_blocks")
            if not name.endswith("_scales") or f"{name.removesuffix('_scales')}_blocks" not in there:
                found.append(StoredTensor(whole, name, None if whole == name else f"{whole}_scales"))
        elif not name.endswith((*SCALES, *IGNORED)):
            scales = next((name + end for end in SCALES if name + end in there), None)
            found.append(StoredTensor(name, name, scales))
    missing = [one for one in found if one.scales is not None and one.scales not in there]
    if missing:
        raise ModelError(f"{missing[0].values} is stored without its scales, {missing[0].scales}. Download it again.")
    return found


def in_full(
    stored: StoredTensor, values: torch.Tensor, scales: torch.Tensor | None, scheme: Scheme | None, dtype: torch.dtype
) -> torch.Tensor:
    """The weight in full width; one that is not quantised stays as it is."""
    if scales is None:
        if values.dtype in FP8_TYPES:
            raise ModelError(f"{stored.values} is stored in eight bits without its scales. Download it again.")
        return values
    assert scheme is not None
    if scheme.method == "mxfp4":
        return from_mxfp4(values, scales, dtype)
    if values.dtype not in FP8_TYPES:
        raise ModelError(
            f"{stored.values} has scales and is stored as {str(values.dtype).removeprefix('torch.')}; Trimtab reads "
            "scaled weights in float8_e4m3fn and float8_e5m2. Use the model's unquantised checkpoint."
        )
    return from_fp8(stored.values, values, scales, scheme.block, dtype)


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., inputs, rows] from [..., rows, G, 16] pairs of four bits and [..., rows, G] exponents of two with a bias of 127.

    Expert weights are stored by outputs and used by inputs, as transformers keeps them: the last two dimensions change places."""
    *front, rows, groups, width = blocks.shape
    if scales.shape != blocks.shape[:-1] or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ModelError(
            f"MXFP4 blocks of shape {tuple(blocks.shape)} and scales of shape {tuple(scales.shape)} do not belong together."
        )
    values = torch.tensor(FP4_VALUES, dtype=torch.float32, device=blocks.device)
    flat, exponents = blocks.reshape(-1, rows, groups, width), scales.reshape(-1, rows, groups)
    out = torch.empty((flat.shape[0], groups * width * 2, rows), dtype=dtype, device=blocks.device)
    step = max(1, READ_CHUNK_ELEMENTS // (groups * width * 2))
    for one, exponent, whole in zip(flat, exponents, out):
        for first in range(0, rows, step):
            part = one[first : first + step]
            pair = torch.stack((values[(part & 15).long()], values[(part >> 4).long()]), -1).flatten(-2)
            pair = torch.ldexp(pair, exponent[first : first + step, :, None].to(torch.int32) - 127)
            whole[:, first : first + step] = pair.flatten(1).t()
    return out.view(*front, groups * width * 2, rows)


def from_fp8(
    name: str, values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """The weight from eight bits and scales: one for each block, one for each row, or one."""
    wide = (scales.to(torch.float32) - 127.0).exp2() if scales.dtype == torch.uint8 else scales.to(torch.float32)
    rows, columns = values.shape[-2:]
    if wide.numel() == 1:
        wide, high, across = wide.reshape(1, 1), rows, columns
    elif wide.ndim == 1 and wide.shape[0] == rows:
        wide, high, across = wide[:, None], 1, columns
    elif wide.shape[-2:] == (rows, 1) and block is None:
        high, across = 1, columns
    elif block is not None and wide.shape[-2:] == (-(-rows // block[0]), -(-columns // block[1])):
        high, across = block
    else:
        grid = "" if block is None else f" in blocks of {block[0]} x {block[1]}"
        raise ModelError(f"{name} of shape {tuple(values.shape)} has scales of shape {tuple(scales.shape)}{grid}.")
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    grid_of = wide.expand(*values.shape[:-2], *wide.shape[-2:]).reshape(-1, *wide.shape[-2:])
    step = max(high, READ_CHUNK_ELEMENTS // columns // high * high)
    for one, scale, whole in zip(values.reshape(-1, rows, columns), grid_of, out.view(-1, rows, columns)):
        for first in range(0, rows, step):
            last = min(rows, first + step)
            part = scale[first // high : -(-last // high)].repeat_interleave(high, 0)[: last - first]
            whole[first:last] = one[first:last].to(torch.float32) * part.repeat_interleave(across, 1)[:, :columns]
    return out
