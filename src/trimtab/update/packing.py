"""Micro-batches under a hard cap.

Guarantee: every sequence lands in exactly one micro-batch and no micro-batch holds more than `budget` tokens, for any
lengths. Within that, as few micro-batches as a greedy packer finds, and as even as they can be made, because the largest one
sets the peak of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of `lengths`, divided into micro-batches; longest sequences first within each."""
    longest = max(lengths, default=0)
    assert longest <= budget, (
        f"a sequence of {longest} tokens does not fit a budget of {budget}; refused before the run"
    )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    tight = _best_fit(order, lengths, budget)
    fewest = -(-sum(lengths) // budget)
    for count in range(max(1, fewest), len(tight) + 1):
        even = _least_loaded(order, lengths, count)
        if max((sum(lengths[i] for i in batch) for batch in even), default=0) <= budget:
            return [batch for batch in even if batch]
    return tight


def _best_fit(order: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Each sequence, longest first, into the fullest micro-batch that still has room."""
    batches: list[list[int]] = []
    room: list[int] = []
    for i in order:
        fitting = [b for b, free in enumerate(room) if free >= lengths[i]]
        if fitting:
            best = min(fitting, key=lambda b: room[b])
            batches[best].append(i)
            room[best] -= lengths[i]
        else:
            batches.append([i])
            room.append(budget - lengths[i])
    return batches


def _least_loaded(order: list[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Each sequence, longest first, into the emptiest of `count` micro-batches."""
    batches: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, b) for b in range(count)]
    heapify(loads)
    for i in order:
        load, b = loads[0]
        batches[b].append(i)
        heapreplace(loads, (load + lengths[i], b))
    return batches
