"""How evenly a step's samples can be dealt to ranks: lengths are drawn, packed under the cap and dealt, as a step will do it.

Micro-batches are packed as evenly as they can be, as many for every rank, and dealt by the work in them, the largest first, each
to the rank that has the least. The step waits for the rank that has the most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace

from trimtab.plan.job import Job

MAX_DRAWN_SEQUENCES = 4096
"""Sequences whose lengths are drawn: with more, ranks are as even as makes no difference."""
GROWTH = 1.05
"""Micro-batches of a rank are tried in steps of this factor, where there are many."""
GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, less their whole parts, fall evenly between 0 and 1 however many there are."""


@dataclass(frozen=True)
class Deal:
    """How a step's work falls on ranks."""

    imbalance: float
    """Work of the rank that has the most, over the mean."""
    micro_batches: int
    """Micro-batches of each rank."""


def deal(job: Job, ranks: int, budget: int) -> Deal:
    """The step of a job, dealt to ranks in micro-batches of at most `budget` tokens."""
    shape = job.shape
    attention = sum(n * b.heads * b.head_size for b, n in shape.kinds.items())
    pair_over_token = attention / max(1, shape.active_parameters)
    return _deal(
        job.sequences, job.samples, job.typical_prompt, job.lengths or (float(job.completion),), ranks, budget,
        pair_over_token,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _deal(
    sequences: int,
    samples: int,
    prompt: int,
    lengths: tuple[float, ...],
    ranks: int,
    budget: int,
    pair_over_token: float,
) -> Deal:
    drawn = min(sequences, MAX_DRAWN_SEQUENCES)
    new = [lengths[int((index + 1) * GOLDEN_RATIO % 1 * len(lengths))] for index in range(drawn)]
    new.sort(reverse=True)
    tokens = [length + prompt / samples for length in new]
    work = [mine + pair_over_token * length * (prompt + length) for mine, length in zip(tokens, new)]
    each = max(1, -(-int(sum(tokens)) // (ranks * budget)))
    while True:
        bins = _spread(tokens, ranks * each)
        if each >= drawn or max(sum(tokens[i] for i in held) for held in bins) <= max(budget, tokens[0]):
            break
        each = max(each + 1, int(GROWTH * each))
    loads = sorted((sum(work[i] for i in held) for held in bins), reverse=True)
    most = max(_dealt(loads, ranks, each))
    return Deal(most / (sum(loads) / ranks), max(1, round(each * sequences / drawn)))


def _spread(sizes: list[float], count: int) -> list[list[int]]:
    """Each, largest first, into the emptiest of so many."""
    found: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, place) for place in range(count)]
    heapify(loads)
    for index, size in enumerate(sizes):
        load, place = loads[0]
        found[place].append(index)
        heapreplace(loads, (load + size, place))
    return found


def _dealt(loads: list[float], ranks: int, each: int) -> list[float]:
    """What every rank has to do when loads, largest first, each go to the rank that has the least and is not full: every rank
    gets `each`."""
    open_ = [(0.0, 0) for _ in range(ranks)]
    full = []
    for load in loads:
        done, count = heappop(open_)
        if count + 1 == each:
            full.append(done + load)
        else:
            heappush(open_, (done + load, count + 1))
    return full
