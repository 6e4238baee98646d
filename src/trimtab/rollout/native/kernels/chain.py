"""Kernels that follow each other without a gap: programmatic dependent launch, and weights read ahead into the L2 cache.

A kernel of the chain lets its successor start as soon as it has itself started, and waits for its predecessor's end before it
reads or writes anything that another kernel writes. Every kernel of the chain waits, in every program, so when one has ended all
before it have. What a program may do before it waits is look at weights, which no kernel of a step writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def launch_options() -> dict[str, bool]:
    """Of every kernel of a chain. Before Hopper, and in the interpreter, kernels follow each other as usual."""
    chained = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return {"CHAIN": True, "launch_pdl": True} if chained else {"CHAIN": False}


@triton.jit
def follow(CHAIN: tl.constexpr):
    """Let the next kernel start; go on when the one before has ended."""
    if CHAIN:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def read_ahead(pointers):
    """Ask for the cache lines at these addresses; the answer is waited for by nobody."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
