"""How a row is cut over the ranks of a group, and by which of the two ways they attend (sequence.py): the one that is cheaper, by
the bytes that a rank receives and by the operations of the rank that has the most. Imports no torch: plans ask the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Way = Literal["heads", "keys"]
FLOP_PER_BYTE = 1200.0
"""Operations that a device does in the time in which it receives a byte: 380e12 over 315e9 a second, an H200 with NVLink."""


@dataclass(frozen=True)
class AttentionSize:
    """How some layers attend."""

    layers: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int

    @property
    def kv_width(self) -> int:
        return self.kv_heads * (self.key_size + self.value_size)


def tokens_of(total: int, ranks: int) -> int:
    """Most tokens that a rank has of a row of so many."""
    return -(-total // ranks)


def spans(way: Way, total: int, ranks: int, rank: int) -> list[tuple[int, int]]:
    """The stretches of a row that a rank has: one with `heads`; one from the beginning and one from the end with `keys`."""
    counts = [total * (r + 1) // ranks - total * r // ranks for r in range(ranks)]
    if way == "heads":
        first = sum(counts[:rank])
        return [(first, first + counts[rank])]
    early = [count // 2 for count in counts]
    late = [count - half for count, half in zip(counts, early)]
    first = sum(early[:rank])
    last = total - sum(late[:rank])
    return [(first, first + early[rank]), (last - late[rank], last)]


def serves_heads(sizes: Iterable[AttentionSize], ranks: int) -> bool:
    """Every rank gets as many query heads."""
    return all(size.heads % ranks == 0 for size in sizes)


def exchanged(way: Way, size: AttentionSize, ranks: int) -> float:
    """Elements that a rank has after the exchanges of a layer's forward pass, for each token of the row; all but its own part of
    them come from others. As many once more in the backward pass."""
    if way == "keys":
        return float(size.kv_width)
    keys = max(size.kv_heads / ranks, 1.0)
    return (size.heads / ranks + keys) * (size.key_size + size.value_size)


def pairs_of_most(way: Way, ranks: int, lengths: Sequence[int], prefixes: Sequence[int | None]) -> float:
    """Pairs of a query and a key that it sees, of the rank that has the most."""
    total = sum(lengths)
    starts = [0, *accumulate(lengths)]
    before = [0 if prefix is None else lengths[prefix] for prefix in prefixes]
    segments = list(zip(starts, lengths, before))
    if way == "heads":
        return sum(n * b + n * (n + 1) / 2 for _, n, b in segments) / ranks

    def pairs(first: int, last: int) -> float:
        found = 0.0
        for start, length, prefix in segments:
            low, high = max(first, start) - start, min(last, start + length) - start
            if low < high:
                found += (high - low) * prefix + (high * (high + 1) - low * (low + 1)) / 2
        return found

    return max(sum(pairs(*part) for part in spans("keys", total, ranks, rank)) for rank in range(ranks))


def cheaper_way(
    sizes: Sequence[AttentionSize],
    ranks: int,
    lengths: Sequence[int],
    prefixes: Sequence[int | None],
    itemsize: int = 2,
) -> Way:
    """The same on every rank of a group, for it depends on nothing but these."""
    if not serves_heads(sizes, ranks):
        return "keys"
    total = sum(lengths)

    def cost(way: Way) -> float:
        elements = sum(size.layers * exchanged(way, size, ranks) for size in sizes)
        moved = (ranks - 1) / ranks * elements * itemsize * total
        pairs = pairs_of_most(way, ranks, lengths, prefixes)
        products = sum(2.0 * size.layers * size.heads * (size.key_size + size.value_size) for size in sizes) * pairs
        return 2.0 * moved * FLOP_PER_BYTE + 3.5 * products  # a backward pass has two and a half times the products

    return "heads" if cost("heads") <= cost("keys") else "keys"
