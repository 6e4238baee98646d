"""Kernels that follow each other without a gap: programmatic dependent launch, and weights read ahead into the L2 cache.

A kernel of the chain waits for its predecessor's end before it reads or writes anything that a kernel of the same step writes,
and then lets its successor start: the successor is in place, and has asked for its weights, when this one ends. Every program of
every kernel waits, so when one has ended all before it have. A step's first kernel follows the sampler, which is not in the
chain, so what a step does not change (which rows it serves, their positions, pages and earlier keys and values, the weights) may
be read before the wait.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def launch_options() -> dict[str, bool]:
    """Launch options of every kernel of a chain. Before Hopper, and in the interpreter, kernels follow each other as usual."""
    chained = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return {"CHAIN": True, "launch_pdl": True} if chained else {"CHAIN": False}


@triton.jit
def follow(CHAIN: tl.constexpr):
    """Go on when the kernel before has ended, and let the next one start."""
    if CHAIN:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def read_ahead(pointers):
    """Prefetch the cache lines at these addresses, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
