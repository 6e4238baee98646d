"""Float8 e4m3 by integers, in kernels: Triton has the type on the newest devices only.

Codes are int32 that hold 8 bits. Rounding is to the nearest, ties to even, as torch's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def from_e4m3(code):
    """The float32 of a float8's bits."""
    rest = code & 0x7F
    exponent, mantissa = rest >> 3, rest & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    found = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 128, -found, found)


@triton.jit
def to_e4m3(x):
    """The nearest float8's bits of float32 numbers of at most 448; larger ones become that."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (tl.abs(x) * 512.0 + 8388608.0).to(
        tl.int32, bitcast=True
    ) & 0xF  # whole numbers of 2^-9, rounded by the addition
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    return code | ((bits >> 24) & 0x80)
