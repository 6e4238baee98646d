"""Products of a few rows with a large matrix, bound by reading the matrix: decode steps of small batches.

The matrix is read once, in tiles that enough programs stream at the same time to fill the memory bus. Where it has too few rows
for that, the sum is cut along the inner dimension into parts, which the consumer adds up in order: no atomics, so the same
input gives the same bits. Gate and up projections are computed side by side and leave as act(gate) * up.

Shapes: B rows, I inputs, O outputs, F feed-forward size, S parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trimtab.model.kernels.chain import follow, launch_options, read_ahead
from trimtab.model.kernels.shared import activate

MAX_ROWS = 128
"""With more rows a product is bound by arithmetic as much as by reading, and cuBLAS is faster (docs/log.md)."""
READ_AHEAD = 4096
"""Elements of the matrix that a program asks for before its input is there."""


@triton.jit
def _skinny(
    X, W, AT, BIAS, OUT, rows, O: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, HAS_BIAS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, LINE: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """OUT[part] = X W^T over this part's inputs; the matrix tile is the left operand, whose side is never short.

    X and W are descriptors, which fill with zeros what lies outside; AT is where W begins.
    """
    first, part = tl.program_id(0) * BN, tl.program_id(1)
    per: tl.constexpr = (I + BK * PARTS - 1) // (BK * PARTS) * BK
    lo = part * per
    hi = tl.minimum(lo + per, I)
    n, m = first + tl.arange(0, BN), tl.arange(0, BM)
    if CHAIN:
        line = tl.minimum(lo + tl.arange(0, AHEAD) * LINE, I - 1)
        soon = AT + tl.minimum(n, O - 1).to(tl.int64)[:, None] * I + line[None, :]
        read_ahead(soon)
        if GATED:
            read_ahead(soon + O * I)
    follow(CHAIN)
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(lo, hi, BK, num_stages=STAGES):
        x = X.load([0, k]).T
        acc = tl.dot(W.load([first, k]), x, acc, input_precision="ieee")
        if GATED:
            acc_up = tl.dot(W.load([O + first, k]), x, acc_up, input_precision="ieee")
    dtype: tl.constexpr = X.dtype
    if HAS_BIAS:
        once = (n < O) & (part + n * 0 == 0)  # the sum has its bias once
        acc += tl.load(BIAS + n, mask=once, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up += tl.load(BIAS + O + n, mask=once, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = activate(acc.to(dtype).to(tl.float32), ACT).to(dtype).to(tl.float32)
        acc = gate * acc_up.to(dtype).to(tl.float32)
    out = OUT + (part * rows + m)[None, :] * O + n[:, None]
    tl.store(out, acc.to(OUT.dtype.element_ty), mask=(n < O)[:, None] & (m < rows)[None, :])


@dataclass(frozen=True)
class Cut:
    """Outputs and inputs of a tile, parts of the sum, warps of a program, tiles in flight."""

    outputs: int
    inputs: int
    parts: int
    warps: int
    stages: int


@cache
def _device() -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory of each; an H200's where there is no device."""
    if not torch.cuda.is_available():
        return 132, 227 * 1024
    device = torch.cuda.get_device_properties()
    return device.multi_processor_count, getattr(
        device, "shared_memory_per_block_optin", device.shared_memory_per_block
    )


def most_rows(outputs: int) -> int:
    """Most rows for which gate and up projections of so many outputs are faster here than in cuBLAS (docs/log.md): 0 before
    Hopper, where the hardware has no descriptors."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        return 0
    return MAX_ROWS if triton.cdiv(outputs, 64) <= _device()[0] else 64


def cut_for(rows: int, outputs: int, inputs: int, itemsize: int, gated: bool, whole: bool) -> Cut:
    """A cut that has all programs on the device at once, and as much of the matrix in flight as there is shared memory for.
    `whole`: the consumer does not add parts up. Measured (docs/log.md)."""
    processors, shared = _device()
    block, parts = _block(rows), 1
    tile, inner = 64, (128 if inputs >= 1024 or gated or whole else 64) * 2 // itemsize
    if whole and not gated and block <= 64 and outputs // tile * 6 < processors:
        tile, inner = 16, 2 * inner
    tiles = triton.cdiv(outputs, tile)
    while parts < 8 and not whole and not gated and inputs // (2 * parts * inner) >= 2:
        if tiles * parts * 2 > processors * (2 if block <= 64 else 1):
            break
        parts *= 2
    room = shared // min(3, triton.cdiv(tiles * parts, processors)) - 2048
    column_bytes = (tile * (2 if gated else 1) + block) * itemsize
    if room // (inner * column_bytes) < 3:
        inner //= 2
    return Cut(tile, inner, parts, 4, max(1, min(6, room // (inner * column_bytes))))


def _block(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))


def serves(weight: torch.Tensor) -> bool:
    """True where a matrix can be read by descriptors: rows that begin at multiples of 16 bytes."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] * weight.element_size() % 16 == 0


def skinny(
    x_BI: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, cut: Cut,
    activation: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Fills and returns the first [S, B, O] of `out`; with an activation the weights are gate and up, and S is 1."""
    rows, inputs = x_BI.shape
    gated = activation is not None
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert rows <= MAX_ROWS and x_BI.is_contiguous() and not (gated and cut.parts > 1)
    line = 128 // weight.element_size()
    ahead = min(inputs // cut.parts, READ_AHEAD // (cut.outputs * (1 + gated))) // line
    block = _block(rows)
    found = out.view(-1)[: cut.parts * rows * outputs].view(cut.parts, rows, outputs)
    _skinny[(triton.cdiv(outputs, cut.outputs), cut.parts)](
        TensorDescriptor.from_tensor(x_BI, [block, cut.inputs]), TensorDescriptor.from_tensor(weight, [cut.outputs, cut.inputs]),
        weight, x_BI if bias is None else bias, found, rows, O=outputs, I=inputs, BM=block, BN=cut.outputs, BK=cut.inputs,
        PARTS=cut.parts, GATED=gated, ACT=activation or 0, HAS_BIAS=bias is not None, STAGES=cut.stages, num_warps=cut.warps,
        AHEAD=triton.next_power_of_2(max(1, ahead)), LINE=line, **launch_options(),
    )  # fmt: skip
    return found
