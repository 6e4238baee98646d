"""A packed row that is cut over several ranks token by token, and attention over it (`run.sequence_parallel`).

Everything in a layer but attention is done token by token, so each rank runs its own tokens; only the plan knows of others.
No padding: ranks' parts may differ by a token. Two ways, equal to the whole row in outputs and gradients:

    heads   ranks exchange tokens for heads, attend over the whole row with a part of the heads each, and exchange back (Ulysses).
            The number of heads has to be a multiple of the number of ranks.
    keys    queries stay, keys and values are gathered, a few heads at a time, and laid out for each piece of a sequence (what is
            often called ring attention with head stride). No condition on heads. A rank has a part from the beginning of the row
            and one from its end, because later tokens see more keys.

Guarantees: a rank's gradients are those of its own tokens, so ranks only add up, and nothing is scaled by their number. Copies of
a key's gradient are summed in float32 (or wider), rank after rank. All ranks of a group take part in the same exchanges in the
same order, also one that has no token of a very short row: it runs a token that nothing is read from.

Shapes: T tokens of the whole row, S of this rank, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from trimtab.base.errors import ModelError
from trimtab.model.attention import Rules
from trimtab.model.packed import PackedPlan, copies_of
from trimtab.model.recurrent import Mixer
from trimtab.model.sequence_way import AttentionSize, Way, cheaper_way, spans, tokens_of
from trimtab.model.transfer import to_device

KEYS_AT_A_TIME_BYTES = 2**28
"""Keys and values of a whole row that are gathered at a time: as many heads as that holds, at least one."""


class SequenceGroup(Protocol):
    """Ranks that run the tokens of the same rows; all of them make the same calls in the same order."""

    rank: int
    """Of this rank among them."""
    ranks: int
    sizes: tuple[AttentionSize, ...]
    """How the layers of the model attend."""

    def exchange(self, x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        """Rows of x, so many for each rank in turn, for rows of each rank in turn."""
        ...

    def gather(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows of all ranks, so many of each."""
        ...


def cut_row(plan: PackedPlan, group: SequenceGroup) -> CutRow:
    """This rank's part of a row that has this plan."""
    way = cheaper_way(group.sizes, group.ranks, plan.lengths, plan.prefixes)
    return CutRow(plan, group, way)


class CutRow:
    """Which tokens of a row this rank runs, and how they attend."""

    def __init__(self, whole: PackedPlan, group: SequenceGroup, way: Way) -> None:
        self.group, self.way, self._device = group, way, whole.device
        total = sum(whole.lengths)
        parts = [
            torch.cat([torch.arange(a, b) for a, b in spans(way, total, group.ranks, r)]) for r in range(group.ranks)
        ]
        self.counts = [len(part) for part in parts]
        self._by_rank = torch.cat(parts)
        """Row positions, rank after rank."""
        mine = parts[group.rank]
        self.real = len(mine)
        """Tokens of the row that are here."""
        rows_S = mine if self.real else torch.zeros(1, dtype=torch.int64)
        self.rows_S = to_device(rows_S, whole.device)
        """Their places in the row; where there are none, the first, which another rank has."""
        self._place_T = torch.full((total,), -1, dtype=torch.int64)
        self._place_T[mine] = torch.arange(self.real)
        self.plan: PackedPlan = HeadsPlan(whole, self) if way == "heads" else KeysPlan(whole, self)

    def own(self, rows_R: torch.Tensor) -> OwnRows:
        """Those of some places of the row that are here. `rows_R`, in host memory, is the same on all ranks of the group."""
        owner_T = torch.empty(len(self._place_T), dtype=torch.int64)
        ends = [0, *accumulate(self.counts)]
        for rank, (first, last) in enumerate(pairwise(ends)):
            owner_T[self._by_rank[first:last]] = rank
        owner_R = owner_T[rows_R]
        chosen = [(owner_R == rank).nonzero()[:, 0] for rank in range(self.group.ranks)]
        mine = chosen[self.group.rank]
        here = self._place_T[rows_R[mine]]
        order = torch.cat(chosen)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        mine, here, back = (to_device(one, self._device) for one in (mine, here, back))
        return OwnRows(self.group, mine, here, back, [len(one) for one in chosen])


@dataclass(frozen=True)
class OwnRows:
    """Some of R places of a row, those that a rank has."""

    group: SequenceGroup
    mine: torch.Tensor
    """Which of the R."""
    here: torch.Tensor
    """Where these are among the rank's own tokens."""
    back: torch.Tensor
    """Where each of the R is among all that ranks have, rank after rank."""
    counts: list[int]

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """One value of each of the R, on every rank, from those that each has of its own. Every rank computes the same from them;
        its gradient is handed to the rank that has the value, once."""
        found: torch.Tensor = _WholeRow.apply(values, self)
        return found


class _WholeRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rows: OwnRows) -> torch.Tensor:
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return rows.group.gather(values, rows.counts).index_select(0, rows.back)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (grad,) = grads
        return None if grad is None else grad.index_select(0, ctx.rows.mine), None


class CutPlan(PackedPlan):
    """What both ways have in common."""

    def recur(self, mixer: Mixer, x_TE: torch.Tensor) -> torch.Tensor:
        raise ModelError(
            "its layers carry a state from token to token, which ranks that share a sequence cannot (sequence_parallel)"
        )


class HeadsPlan(CutPlan):
    """The whole row's attention, for some of the heads."""

    def __init__(self, whole: PackedPlan, row: CutRow) -> None:
        super().__init__(whole.lengths, whole.device, whole.prefixes)
        self._row, self._all_positions = row, whole.positions

    @cached_property
    def positions(self) -> torch.Tensor:
        return self._all_positions[self._row.rows_S]

    @property
    def keys(self) -> int:
        return -(-super().keys // self._row.group.ranks)

    @property
    def pairs(self) -> int:
        return -(-super().pairs // self._row.group.ranks)

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        row = self._row
        split = HeadSplit(q_THD.shape[1], k_TKD.shape[1], row.group.ranks)
        q, k, v = _ToHeads.apply(q_THD[: row.real], k_TKD[: row.real], v_TKD[: row.real], row, split)
        heads = split.queries(row.group.rank)
        out = super().attend(layer, q, k, v, rules_of_heads(rules, heads))
        out = _ToTokens.apply(out, row)
        return out if row.real else torch.cat((out, out.new_zeros((1, *out.shape[1:]))))


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank attends with."""

    heads: int
    kv_heads: int
    ranks: int

    def queries(self, rank: int) -> slice:
        own = self.heads // self.ranks
        return slice(rank * own, (rank + 1) * own)

    def keys(self, rank: int) -> list[int]:
        """Key/value heads that a rank's query heads look at: each once where they share them evenly, else one for each."""
        group, mine = self.heads // self.kv_heads, self.queries(rank)
        seen = [head // group for head in range(mine.start, mine.stop)]
        once = sorted(set(seen))
        return once if all(seen.count(head) * len(once) == len(seen) for head in once) else seen


class _ToHeads(torch.autograd.Function):
    """All tokens of the row with some heads, for some tokens with all heads."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: CutRow, split: HeadSplit
    ) -> tuple[torch.Tensor, ...]:
        ctx.row, ctx.split = row, split
        ctx.sizes = [(x.shape[1], x.shape[2]) for x in (q, k, v)]
        for_rank = []
        for rank in range(split.ranks):
            chosen = split.keys(rank)
            for_rank.append(
                torch.cat([q[:, split.queries(rank)].flatten(1), k[:, chosen].flatten(1), v[:, chosen].flatten(1)], 1)
            )
        widths = {part.shape[1] for part in for_rank}
        if len(widths) > 1:  # ranks that share heads unevenly with others have more of them
            most = max(widths)
            for_rank = [torch.nn.functional.pad(part, (0, most - part.shape[1])) for part in for_rank]
        sent = [q.shape[0]] * split.ranks
        got = row.group.exchange(torch.cat(for_rank), row.counts, sent)
        return _apart(got, _widths(ctx.sizes, split, row.group.rank))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row, split, sizes = ctx.row, ctx.split, ctx.sizes
        joined = torch.cat([grad.flatten(1) for grad in grads], 1)
        most = max(sum(h * d for h, d in _widths(sizes, split, rank)) for rank in range(split.ranks))
        if joined.shape[1] < most:
            joined = torch.nn.functional.pad(joined, (0, most - joined.shape[1]))
        own = row.counts[row.group.rank]
        parts = row.group.exchange(joined, [own] * split.ranks, row.counts).split(own)
        dq = joined.new_empty((own, *sizes[0]))
        wide = torch.promote_types(joined.dtype, torch.float32)
        dk, dv = (joined.new_zeros((own, *size), dtype=wide) for size in sizes[1:])
        for rank, part in enumerate(parts):
            some_q, some_k, some_v = _apart(part, _widths(sizes, split, rank))
            dq[:, split.queries(rank)] = some_q
            for place, head in enumerate(split.keys(rank)):
                dk[:, head] += some_k[:, place]
                dv[:, head] += some_v[:, place]
        return dq, dk.to(joined.dtype), dv.to(joined.dtype), None, None


def _widths(sizes: Sequence[tuple[int, int]], split: HeadSplit, rank: int) -> list[tuple[int, int]]:
    """Heads and head size of the queries, keys and values that a rank gets."""
    keys = len(split.keys(rank))
    return [(split.heads // split.ranks, sizes[0][1]), (keys, sizes[1][1]), (keys, sizes[2][1])]


def _apart(joined: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    used = [heads * size for heads, size in sizes]
    parts = joined[:, : sum(used)].split(used, 1)
    return tuple(part.reshape(part.shape[0], *size) for part, size in zip(parts, sizes))


class _ToTokens(torch.autograd.Function):
    """Some tokens with all heads, for all tokens of the row with some heads."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, row: CutRow) -> torch.Tensor:
        ctx.row, ranks, own = row, row.group.ranks, row.counts[row.group.rank]
        parts = row.group.exchange(out.flatten(1), [own] * ranks, row.counts)
        return parts.view(ranks, own, *out.shape[1:]).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,), row = grads, ctx.row
        ranks, own = row.group.ranks, row.counts[row.group.rank]
        parts = grad.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).flatten(1)
        got = row.group.exchange(parts, row.counts, [own] * ranks)
        return got.view(got.shape[0], -1, grad.shape[2]), None


class KeysPlan(CutPlan):
    """This rank's tokens as pieces of sequences, each of which sees what comes before it, wherever that is."""

    def __init__(self, whole: PackedPlan, row: CutRow) -> None:
        total = sum(whole.lengths)
        pieces = pieces_of(whole.lengths, whole.prefixes, spans("keys", total, row.group.ranks, row.group.rank))
        super().__init__([piece.length for piece in pieces], whole.device, before=[piece.before for piece in pieces])
        self._row, self._longest = row, whole.longest
        place_T = torch.empty(total, dtype=torch.int64)
        place_T[row._by_rank] = torch.arange(total)
        seen = [torch.arange(first, last) for piece in pieces for first, last in piece.seen]
        self._seen = to_device(place_T[torch.cat(seen)] if seen else torch.empty(0, dtype=torch.int64), whole.device)
        """Where the keys that each piece sees are among those that were gathered, piece after piece."""
        self._all_positions = whole.positions

    @cached_property
    def longest(self) -> int:
        return self._longest

    @cached_property
    def positions(self) -> torch.Tensor:
        return self._all_positions[self._row.rows_S]

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        row, kv_heads = self._row, k_TKD.shape[1]
        group = q_THD.shape[1] // kv_heads
        one = (k_TKD.shape[2] + v_TKD.shape[2]) * k_TKD.element_size() * sum(row.counts)
        stride = max(1, min(kv_heads, KEYS_AT_A_TIME_BYTES // one))
        found = []
        for first in range(0, kv_heads, stride):
            keys = slice(first, min(kv_heads, first + stride))
            queries = slice(keys.start * group, keys.stop * group)
            joined = torch.cat((k_TKD[: row.real, keys], v_TKD[: row.real, keys]), -1)
            gathered = _GatheredKeys.apply(joined, row)
            found.append(self._some(layer, q_THD[:, queries], gathered, v_TKD.shape[2], rules_of_heads(rules, queries)))
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _some(self, layer: int, q: torch.Tensor, gathered: torch.Tensor, size: int, rules: Rules) -> torch.Tensor:
        """Attention with some of the heads. `size`: of a value."""
        if not self._row.real:  # nothing is read from it, and the gradient has to come through here all the same
            return q.new_zeros((1, q.shape[1], size)) + gathered[:0].sum() + q[:0].sum()
        both = gathered.split((gathered.shape[-1] - size, size), -1)
        k, v = (self._lay_out(x, self._seen) for x in both)
        return super().attend(layer, q, k, v, rules)

    @cached_property
    def _copies(self) -> tuple[torch.Tensor, torch.Tensor]:
        return copies_of(self._seen, sum(self._row.counts))


@dataclass(frozen=True)
class RowPiece:
    """Tokens of one segment that lie side by side on one rank."""

    length: int
    before: int
    """Tokens of its sequence that precede it."""
    seen: tuple[tuple[int, int], ...]
    """Stretches of the row that it sees: its segment's prefix, and its segment to its own end."""


def pieces_of(
    lengths: Sequence[int], prefixes: Sequence[int | None], parts: Sequence[tuple[int, int]]
) -> list[RowPiece]:
    """The pieces that stretches of a row consist of."""
    starts = [0, *accumulate(lengths)]
    found = []
    for first, last in parts:
        while first < last:
            segment = bisect_right(starts, first) - 1
            end = min(last, starts[segment + 1])
            prefix = prefixes[segment]
            seen = [] if prefix is None else [(starts[prefix], starts[prefix + 1])]
            before = first - starts[segment] + sum(b - a for a, b in seen)
            found.append(RowPiece(end - first, before, (*seen, (starts[segment], end))))
            first = end
    return found


class _GatheredKeys(torch.autograd.Function):
    """Keys and values of all ranks. The gradient of a rank's own is the sum of what ranks found for them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row: CutRow) -> torch.Tensor:
        ctx.row = row
        return row.group.gather(x, row.counts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,), row = grads, ctx.row
        own = row.counts[row.group.rank]
        parts = row.group.exchange(grad.contiguous(), [own] * row.group.ranks, row.counts)
        wide = torch.promote_types(grad.dtype, torch.float32)
        return parts.view(row.group.ranks, own, *grad.shape[1:]).sum(0, dtype=wide).to(grad.dtype), None


def rules_of_heads(rules: Rules, heads: slice) -> Rules:
    return rules if rules.sinks_H is None else replace(rules, sinks_H=rules.sinks_H[heads])


def tokens_here(total: int, group: SequenceGroup | None) -> int:
    """Most tokens that any rank has of a row of so many."""
    return total if group is None else tokens_of(total, group.ranks)
