"""Who computes which micro-batch of a step.

Guarantees, for any samples, budget and number of ranks: every sample is in exactly one micro-batch of one rank; no micro-batch
holds more than the budget, unless a single sample (or pair) does; every token has the share of the loss that it was given before,
so ranks only add up. A rank may have nothing to do.

Samples of a prompt stay together in parts. Parts are dealt to ranks by counted FLOPs, the largest first, each to the rank that
has the least to do; a rank packs its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import torch

from trimtab.update.batch import Sample, row_tokens
from trimtab.update.packing import pack

Together = Callable[[Sequence[Sample], int], list[list[Sample]]]
"""Samples in parts that belong into one micro-batch each, for a budget (`Objective.together`)."""


@dataclass(frozen=True)
class Share:
    """Micro-batches that one rank computes."""

    batches: list[list[Sample]]
    places: list[list[int]]
    """For each micro-batch, where its samples are among those of the step."""
    loads: list[int]
    """Tokens of each micro-batch."""
    cap: int
    """Most tokens that a micro-batch may hold."""
    flops: float = 0.0
    """Counted cost of all of them, in any unit."""
    fillers: int = 0
    """How many of the last micro-batches weigh nothing: this rank computes them because others wait for it in collectives."""
    choices: torch.Tensor | None = None
    """[layers, experts]: by how many learned tokens of the whole step each expert is chosen, where experts are balanced."""


@dataclass(frozen=True)
class Cost:
    """FLOPs of a forward and backward pass, in any unit: so much a token, and so much a pair of a query and a key."""

    token: float = 1.0
    pair: float = 0.0

    def of(self, part: Sequence[Sample]) -> float:
        """Of samples of one prompt in one row, each of which sees the prompt."""
        prompt = len(part[0].prompt_tokens)
        pairs = prompt * (prompt + 1) / 2
        for sample in part:
            count = sample.tokens.shape[0]
            pairs += count * prompt + count * (count + 1) / 2
        return self.token * row_tokens(part) + self.pair * pairs


def cap(samples: Sequence[Sample], budget: int) -> int:
    """A sequence is never cut. One that is longer than the budget, which a run is refused for at its start, comes only after the
    budget was lowered because memory ran out."""
    return max([budget, *(row_tokens([sample]) for sample in samples)])


def pack_samples(together: Together, samples: Sequence[Sample], budget: int) -> Share:
    """All micro-batches of a step, for one rank."""
    most = cap(samples, budget)
    return _share(together(samples, most), _places(samples), most, 0.0)


def deal_samples(
    together: Together, samples: Sequence[Sample], budget: int, ranks: int, cost: Cost, equal: bool = False
) -> list[Share]:
    """The micro-batches of a step for each rank; with `equal`, as many for each, filled up with some that weigh nothing."""
    most = cap(samples, budget)
    longest = max((row_tokens([sample]) for sample in samples), default=0)
    total = sum(row_tokens([sample]) for sample in samples)
    # Parts that are small enough for every rank to get some.
    parts = together(samples, min(most, max(longest, total // ranks)))
    dealt, loads = deal([cost.of(part) for part in parts], ranks)
    places = _places(samples)
    shares = [_share([parts[i] for i in mine], places, most, load) for mine, load in zip(dealt, loads)]
    if not equal:
        return shares
    smallest = min(parts, key=row_tokens)
    count = max(len(share.batches) for share in shares)
    return [_filled(share, count - len(share.batches), smallest) for share in shares]


def _filled(share: Share, missing: int, part: Sequence[Sample]) -> Share:
    """The share with so many more micro-batches, each of samples whose every token weighs 0."""
    twins: dict[int, Sample] = {}
    for sample in part:
        twins[id(sample)] = replace(sample, weights=torch.zeros_like(sample.weights))
    for sample in part:  # one of a pair knows the other
        mate = getattr(sample, "mate", None)
        if mate is not None:
            twins[id(sample)].mate = twins[id(mate)]  # type: ignore[attr-defined]
    batch = list(twins.values())
    return replace(
        share,
        batches=share.batches + [batch] * missing,
        places=share.places + [[0] * len(batch)] * missing,
        loads=share.loads + [row_tokens(batch)] * missing,
        fillers=missing,
    )


def deal(costs: Sequence[float], ranks: int) -> tuple[list[list[int]], list[float]]:
    """Indices of `costs` for each rank, and what each rank's cost in all."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        dealt[rank].append(index)
        heapreplace(loads, (load + costs[index], rank))
    return dealt, [load for load, _ in sorted(loads, key=lambda pair: pair[1])]


def _places(samples: Sequence[Sample]) -> dict[int, int]:
    return {id(sample): place for place, sample in enumerate(samples)}


def _share(parts: Sequence[Sequence[Sample]], places: dict[int, int], most: int, flops: float) -> Share:
    sizes = [row_tokens(part) for part in parts]
    most = max([most, *sizes])
    batches, loads = [], []
    for indices in pack(sizes, most):
        batches.append([sample for i in indices for sample in parts[i]])
        loads.append(sum(sizes[i] for i in indices))
    return Share(batches, [[places[id(s)] for s in batch] for batch in batches], loads, most, flops)
