"""Attention over several sequences laid end to end in one row, each seeing only itself. Exact: no mask, no padding.

On CUDA in half precision one variable-length flash kernel does the whole row. Elsewhere segments of equal length that lie
next to each other become the rows of one dense call, so callers sort sequences by length where they can.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from trimtab.model.attention import Rules, dense_attention

_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


class PackedPlan:
    """Segments of the given lengths, in order, filling the row exactly."""

    def __init__(self, lengths: list[int], device: torch.device | str) -> None:
        self.lengths = lengths
        self.device = torch.device(device)
        self.runs = [(length, len(list(same))) for length, same in groupby(lengths)]

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of every token in its own sequence."""
        return torch.cat([torch.arange(n) for n in self.lengths]).to(self.device)

    @cached_property
    def _offsets(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32).to(self.device)

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        if q_THD.is_cuda and rules.plain and q_THD.dtype in (torch.bfloat16, torch.float16):
            return self._flash(q_THD, k_TKD, v_TKD, rules)
        sizes = [length * count for length, count in self.runs]
        parts = zip(self.runs, q_THD.split(sizes), k_TKD.split(sizes), v_TKD.split(sizes))
        return torch.cat([_rows(q, k, v, count, rules) for (_, count), q, k, v in parts])

    def _flash(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules) -> torch.Tensor:
        group = q_THD.shape[1] // k_TKD.shape[1]
        extra: dict[str, Any] = {}
        if group > 1 and _VARLEN_HAS_GQA:
            extra["enable_gqa"] = True
        elif group > 1:
            k_TKD, v_TKD = k_TKD.repeat_interleave(group, 1), v_TKD.repeat_interleave(group, 1)
        left = -1 if rules.window is None else rules.window - 1
        longest = max(self.lengths)
        out = varlen_attn(
            q_THD.contiguous(),
            k_TKD.contiguous(),
            v_TKD.contiguous(),
            self._offsets,
            self._offsets,
            longest,
            longest,
            scale=rules.scale,
            window_size=(left, 0),
            **extra,
        )
        assert isinstance(out, torch.Tensor)
        return out


def _rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, count: int, rules: Rules) -> torch.Tensor:
    """`count` neighbouring segments of equal length as the rows of one dense call."""
    q_NHLD, k_NKLD, v_NKLD = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    return dense_attention(q_NHLD, k_NKLD, v_NKLD, rules).transpose(1, 2).flatten(0, 1)
