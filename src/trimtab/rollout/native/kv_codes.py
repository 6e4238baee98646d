"""Keys and values in 8 bits: e4m3 with a power of two for each head of each token.

The power is the smallest that brings the head's largest number below 256, so that no number of any size is out of range and a
scale is one byte. Multiplying by it is exact: what is lost is e4m3's rounding, at most a 16th of a number, and no more by storing
what was read. The decode kernel writes the same codes (kernels/attention.py).

Shapes: K heads, D head size.
"""

from __future__ import annotations

from typing import Literal

import torch

from trimtab.model.shapes import LayerShape

Stored = Literal["auto", "bf16", "fp8"]
"""How keys and values are stored: in the model's type, in bfloat16, or in these codes."""
LEAST_POWER = -107
"""Numbers of heads whose largest is smaller yet lose digits: they are below 1e-31."""


def stored_bytes(shape: LayerShape, dtype: torch.dtype, stored: Stored) -> int:
    """Bytes of a token in a layer of a model of this type."""
    if stored == "fp8":
        return shape.bytes_per_token(1) + shape.key[0] + shape.value[0]
    return shape.bytes_per_token(2 if stored == "bf16" else dtype.itemsize)


def encode(x_KD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., K, D] uint8 and powers [..., K] int8."""
    wide = x_KD.float()
    power = (torch.frexp(wide.abs().amax(-1)).exponent - 8).clamp(min=LEAST_POWER)
    codes = torch.ldexp(wide, -power[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, power.to(torch.int8)


def decode(codes_KD: torch.Tensor, powers_K: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What codes stand for."""
    wide = codes_KD.view(torch.float8_e4m3fn).float()
    return torch.ldexp(wide, powers_K[..., None].int()).to(dtype)
