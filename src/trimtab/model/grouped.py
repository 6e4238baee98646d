"""Tokens sorted by expert, and products over them: every row times the matrix of its own expert.

On a CUDA device nothing here waits for the host, forward or backward: where the rows of an expert end is known to the device
only. There a product is torch's grouped one where that has a kernel (bfloat16, Hopper and later) and one of Trimtab's own
elsewhere (kernels/grouped.py); gradients of weights go into float32 sums without rounding. Elsewhere, and in float64, experts are
gone through one by one.

Shapes: T tokens, K experts of each token, S = T K pairs of both, sorted by expert, G experts, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ExpertOrder:
    """The pairs of a token and one of its experts, sorted by expert."""

    used: int
    """Experts of each token."""
    pair_S: torch.Tensor
    """Which pair is at each place."""
    back_S: torch.Tensor
    """The place of each pair."""
    expert_S: torch.Tensor
    ends_G: torch.Tensor
    """int32: where each expert's pairs end."""

    @classmethod
    def of(cls, index_TK: torch.Tensor, experts: int) -> ExpertOrder:
        expert_S, pair_S = torch.sort(index_TK.flatten(), stable=True)
        numbers = torch.arange(1, experts + 1, device=index_TK.device, dtype=expert_S.dtype)
        ends = torch.searchsorted(expert_S, numbers).to(torch.int32)
        places = torch.arange(pair_S.shape[0], device=index_TK.device)
        back = torch.empty_like(pair_S).scatter_(0, pair_S, places)
        return cls(index_TK.shape[1], pair_S, back, expert_S, ends)

    def spread(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[S, E]: the token of each pair."""
        return x_TE.index_select(0, self.pair_S // self.used)

    def sorted(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[S]: one number for each pair."""
        return x_TK.flatten().index_select(0, self.pair_S)

    def combine(self, y_SE: torch.Tensor, weights_TK: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E]: what a token's experts made, times their weights, added up in float32 or wider."""
        if _by_kernels(y_SE):
            from trimtab.model.kernels import grouped as kernels

            return kernels.combine(y_SE, self.back_S, weights_TK, self.used)
        wide = torch.promote_types(y_SE.dtype, torch.float32)
        y_TKE = y_SE.index_select(0, self.back_S).unflatten(0, (-1, self.used)).to(wide)
        if weights_TK is not None:
            y_TKE = y_TKE * weights_TK[..., None].to(wide)
        return y_TKE.sum(1).to(y_SE.dtype)


def product(x_SI: torch.Tensor, w_GIO: torch.Tensor, order: ExpertOrder) -> torch.Tensor:
    """[S, O]: each row times its expert's matrix."""
    if _torch_serves(x_SI, w_GIO):
        return F.grouped_mm(x_SI, w_GIO, offs=order.ends_G)
    if _by_kernels(x_SI):
        from trimtab.model.kernels import grouped as kernels

        return kernels.product(x_SI.contiguous(), w_GIO, order.ends_G)
    out = x_SI.new_empty((x_SI.shape[0], w_GIO.shape[2]))
    for expert, (begin, end) in _stretches(order):
        torch.mm(x_SI[begin:end], w_GIO[expert], out=out[begin:end])
    return out


def add_outer(total_GAB: torch.Tensor, a_SA: torch.Tensor, b_SB: torch.Tensor, order: ExpertOrder) -> None:
    """total[g] += a^T b over the rows of expert g."""
    if _by_kernels(a_SA):
        from trimtab.model.kernels import grouped as kernels

        kernels.add_outer(total_GAB, a_SA.contiguous(), b_SB.contiguous(), order.ends_G)
        return
    for expert, (begin, end) in _stretches(order):
        total_GAB[expert] += a_SA[begin:end].t() @ b_SB[begin:end]


def _stretches(order: ExpertOrder) -> list[tuple[int, tuple[int, int]]]:
    """Experts that have rows, and their rows: the host looks at them."""
    if order.ends_G.device.type == "meta":
        return []
    ends = order.ends_G.tolist()
    return [(expert, (begin, end)) for expert, (begin, end) in enumerate(zip([0, *ends], ends)) if begin < end]


def _by_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and _triton()


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


@cache
def _grouped_kernel(index: int) -> bool:
    """torch's grouped product has a kernel here that reads where rows end on the device; elsewhere it asks the host."""
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(index)[0] in (9, 10)


def _torch_serves(x_SI: torch.Tensor, w_GIO: torch.Tensor) -> bool:
    if not x_SI.is_cuda or x_SI.dtype != torch.bfloat16 or not _grouped_kernel(x_SI.get_device()):
        return False
    # What the kernel asks: rows and matrices that begin at multiples of 16 bytes, one of the two inner strides being 1.
    dense = 1 in w_GIO.stride()[1:]
    aligned = x_SI.data_ptr() % 16 == 0 and w_GIO.data_ptr() % 16 == 0
    return dense and aligned and x_SI.is_contiguous() and all(size % 8 == 0 for size in w_GIO.shape[1:])
