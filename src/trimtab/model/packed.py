"""Attention over several sequences laid end to end in one row, each seeing only itself. Exact: no mask, no padding.

A segment may continue from another one: the completions of a prompt all see the prompt's tokens, which are in the row once.
Their keys and values are then laid out again for the attention, prefix and own, by one gather a layer.

On CUDA in half precision one variable-length flash kernel does the whole row. Elsewhere segments of equal length that lie
next to each other become the rows of one dense call, so callers sort sequences by length where they can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate, groupby
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from trimtab.model.attention import Rules, causal_window, dense_attention
from trimtab.model.recurrent import Mixer, PackedMixing
from trimtab.model.sinks import varlen_with_sinks
from trimtab.model.transfer import to_device
from trimtab.model.versions import grouped_varlen_attn

MOST_FLASH_SIZE = 256
"""Elements of a head up to which there are flash kernels."""
MAX_MASK_ELEMENTS = 2**25
"""Most elements of a mask: the queries of a longer segment are taken some at a time."""


class PackedPlan:
    """Segments of the given lengths, in order, filling the row exactly.

    `prefixes` names for each segment the earlier segment it continues from, which continues from none itself; None: it begins
    a sequence. Alternatively `before` says how many tokens of its sequence precede each segment, and the caller lays out the
    keys and values that each segment sees, its predecessors and itself.
    """

    def __init__(
        self,
        lengths: list[int],
        device: torch.device | str,
        prefixes: Sequence[int | None] | None = None,
        before: Sequence[int] | None = None,
    ) -> None:
        assert prefixes is None or before is None
        self.lengths = lengths
        self.device = torch.device(device)
        self._prefixes: list[int | None] = list(prefixes) if prefixes is not None else [None] * len(lengths)
        self._before = list(before) if before else [0 if p is None else lengths[p] for p in self._prefixes]
        self._continues = before is not None and any(before)
        """Segments go on from what is not in the row."""
        self.runs = [
            (before, length, len(list(same))) for (before, length), same in groupby(zip(self._before, lengths))
        ]
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}

    @property
    def prefixes(self) -> list[int | None]:
        """The segment that each continues from."""
        return self._prefixes

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence that any segment ends."""
        return max(before + length for before, length in zip(self._before, self.lengths))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of every token in its own sequence."""
        at = torch.cat([torch.arange(b, b + n) for b, n in zip(self._before, self.lengths)])
        return to_device(at, self.device)

    @property
    def keys(self) -> int:
        """Keys that all segments see, together."""
        return sum(before + length for before, length in zip(self._before, self.lengths))

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key, masked ones included."""
        return sum(length * (before + length) for before, length in zip(self._before, self.lengths))

    @cached_property
    def _offsets(self) -> torch.Tensor:
        return to_device(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32), self.device)

    @cached_property
    def _key_offsets(self) -> torch.Tensor:
        seen = [b + n for b, n in zip(self._before, self.lengths)]
        return to_device(torch.tensor([0, *accumulate(seen)], dtype=torch.int32), self.device)

    @cached_property
    def _keys_seen(self) -> torch.Tensor | None:
        """Row positions that each segment sees, segment after segment; None where that is the row itself."""
        if all(prefix is None for prefix in self._prefixes):
            return None
        starts = [0, *accumulate(self.lengths)]
        parts = []
        for index, prefix in enumerate(self._prefixes):
            if prefix is not None:
                parts.append(torch.arange(starts[prefix], starts[prefix + 1]))
            parts.append(torch.arange(starts[index], starts[index + 1]))
        return to_device(torch.cat(parts), self.device)

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        if self._keys_seen is not None:
            k_TKD, v_TKD = self._lay_out(k_TKD, self._keys_seen), self._lay_out(v_TKD, self._keys_seen)
        size, value_size = q_THD.shape[-1], v_TKD.shape[-1]
        narrow = size <= MOST_FLASH_SIZE and value_size <= size and q_THD.dtype in (torch.bfloat16, torch.float16)
        if q_THD.is_cuda and rules.flash and narrow:  # whose kernels know one size of head
            padded = v_TKD if value_size == size else torch.nn.functional.pad(v_TKD, (0, size - value_size))
            return self._flash(q_THD, k_TKD, padded, rules)[..., :value_size]
        if len(self.runs) == 1:
            return self._rows(0, q_THD, k_TKD, v_TKD, rules)
        own = [length * count for _, length, count in self.runs]
        seen = [(before + length) * count for before, length, count in self.runs]
        parts = zip(q_THD.split(own), k_TKD.split(seen), v_TKD.split(seen))
        return torch.cat([self._rows(run, q, k, v, rules) for run, (q, k, v) in enumerate(parts)])

    @cached_property
    def _mixing(self) -> PackedMixing:
        return PackedMixing(self.lengths, self._prefixes, self.device, take_rows)

    def recur(self, mixer: Mixer, x_TE: torch.Tensor) -> torch.Tensor:
        whole = not self._continues and x_TE.shape[0] == sum(self.lengths)
        assert whole, "a layer that carries a state needs all tokens of a sequence in one place"
        return self._mixing(mixer, x_TE)

    def _lay_out(self, x_TKD: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return _take(x_TKD, seen, lambda: self._copies)

    @cached_property
    def _copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._keys_seen is not None
        return copies_of(self._keys_seen, sum(self.lengths))

    def _rows(self, run: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        """Neighbouring segments of equal length as the rows of one dense call."""
        before, length, count = self.runs[run]
        q_NHLD, k_NKSD, v_NKSD = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
        if not before or length * (before + length) <= MAX_MASK_ELEMENTS:
            allowed = self._allowed(before, length, rules.window) if before else None
            return dense_attention(q_NHLD, k_NKSD, v_NKSD, rules, allowed).transpose(1, 2).flatten(0, 1)
        found, step = [], max(1, MAX_MASK_ELEMENTS // (before + length))
        for first in range(0, length, step):
            seen = before + min(first + step, length)
            some = q_NHLD[:, :, first : first + step], k_NKSD[:, :, :seen], v_NKSD[:, :, :seen]
            # Masks of all parts together would be as large as that of the whole: they are made again in the backward pass.
            found.append(checkpoint(_last_queries, *some, rules, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(found, 2).transpose(1, 2).flatten(0, 1)

    def _allowed(self, before: int, length: int, window: int | None) -> torch.Tensor:
        """The mask, made once a forward pass: it is the same for all layers with the same window."""
        key = (before, length, window)
        if key not in self._masks:
            at = torch.arange(before + length, device=self.device)
            self._masks[key] = causal_window(at[before:], at, window)
        return self._masks[key]

    def _flash(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules) -> torch.Tensor:
        left = -1 if rules.window is None else rules.window - 1
        where = (self._offsets, self._key_offsets, max(self.lengths), self.longest)
        if rules.sinks_H is not None:
            return varlen_with_sinks(q_THD, k_TKD, v_TKD, rules.sinks_H, *where, rules.scale, left)
        return grouped_varlen_attn(q_THD, k_TKD, v_TKD, *where, rules.scale, left)


def _last_queries(q_NHLD: torch.Tensor, k_NKSD: torch.Tensor, v_NKSD: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Attention of the queries that end with the last key."""
    at = torch.arange(k_NKSD.shape[2], device=q_NHLD.device)
    mask = causal_window(at[len(at) - q_NHLD.shape[2] :], at, rules.window)
    return dense_attention(q_NHLD, k_NKSD, v_NKSD, rules, mask)


def take_rows(x_TX: torch.Tensor, rows_S: torch.Tensor) -> torch.Tensor:
    """Rows of x, some of them several times; on a GPU the gradients of such copies add up in float32, in order."""
    return _take(x_TX, rows_S, lambda: copies_of(rows_S, x_TX.shape[0]))


def _take(
    x_TX: torch.Tensor, rows_S: torch.Tensor, copies: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    narrow = x_TX.dtype != torch.float64
    if x_TX.is_cuda and narrow and torch.is_grad_enabled() and find_spec("triton") is not None:
        out: torch.Tensor = _Copies.apply(x_TX, rows_S, *copies())
        return out
    return x_TX.index_select(0, rows_S)


def copies_of(rows_S: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the copies of each of `count` rows lie: an order of all copies, and where in it each row's begin."""
    row, order = torch.sort(rows_S, stable=True)
    return order, torch.searchsorted(row, torch.arange(count + 1, device=rows_S.device))


class _Copies(torch.autograd.Function):
    """Rows of x, some several times. Their gradients add up in float32, in order; PyTorch would add in x's type, atomically."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, seen: torch.Tensor, order: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(order, starts)
        return x.index_select(0, seen)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from trimtab.model.kernels.train import sum_copies

        return sum_copies(grads[0].contiguous(), *ctx.saved_tensors), None, None, None
