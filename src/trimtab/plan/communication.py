"""Seconds that ranks spend telling each other gradients and weights, beyond what computing hides.

    none        gradients of all ranks are added up once a step
    optimizer   they are scattered once a step; the stepped weights are gathered
    gradients   they are scattered in every micro-batch, layer by layer; the stepped weights are gathered
    full        weights are gathered for every forward and every backward pass, and gradients scattered after it

A backward pass hides what is begun while it runs: under `full` always, elsewhere with `run.overlap`. In the first three that is
the sum of layers and head inside a set of parts, in the last backward pass of a step (`gradients`: in each). The embedding is
done when the pass is, and weights are gathered after the optimizer has stepped.
Ranks that share micro-batches exchange queries, keys and values in every layer, whatever else is in parts.
Where there are several sets of parts, what is scattered inside a set is then added up between them. Adapters are added up whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab.model.sequence_way import cheaper_way, exchanged
from trimtab.plan.job import Job, Machine
from trimtab.plan.links import groups_of, row_group
from trimtab.plan.placement import Placement
from trimtab.plan.shape import ModelShape

HIDDEN_SHARE = 0.7
"""Share of a collective that a pass hides which runs at the same time, if the pass takes as long. An estimate."""
GRADIENT_BYTES = 4
"""Bytes of an element of the sums that are reduced."""
BACKWARD_SHARE = 2 / 3
"""Share of a micro-batch's time that its backward pass takes."""


@dataclass(frozen=True)
class Communication:
    """Seconds of a step in which devices wait for each other's bytes."""

    score: float = 0.0
    update: float = 0.0
    """In the micro-batches of the update."""
    optimizer: float = 0.0
    """Once an optimizer step."""
    publish: float = 0.0
    """To give engines weights that no device has whole."""

    @property
    def total(self) -> float:
        return self.score + self.update + self.optimizer + self.publish


NO_COMMUNICATION = Communication()


@dataclass(frozen=True)
class Passes:
    """Micro-batches of each rank, and the seconds that one takes."""

    count: int
    seconds: float

    @property
    def total(self) -> float:
        return self.count * self.seconds


def communication(
    job: Job, machine: Machine, place: Placement, update: Passes, scoring: Passes, overlap: bool = True,
    recompute: bool = False,
) -> Communication:  # fmt: skip
    """`scoring`: all passes without gradients. `overlap`: of the run. `recompute`: layers run again in the backward pass."""
    if place.devices == 1:
        return NO_COMMUNICATION
    found = _of_model(job, job.shape, machine, place, update, scoring, overlap)
    if place.rows.most > 1:
        shared = of_shared_rows(job, machine, place, update.count, scoring.count, recompute)
        found = replace(found, score=found.score + shared.score, update=found.update + shared.update)
    if job.critic is not None:
        critic = _of_model(job, job.critic, machine, place, update, Passes(0, 0.0), overlap)
        found = Communication(
            found.score, found.update + critic.update, found.optimizer + critic.optimizer, found.publish
        )
    return found


def _of_model(
    job: Job, shape: ModelShape, machine: Machine, place: Placement, update: Passes, scoring: Passes, overlap: bool
) -> Communication:
    everyone, parts, copies = groups_of(machine, place)
    calls = shape.layers + (1 if shape.tied else 2)
    weights = shape.parameters * job.itemsize
    gradients = GRADIENT_BYTES * (job.adapters if job.rank else shape.parameters)
    whole = parts.half_s(weights, calls)
    if place.shard == "full":
        gathering = _beyond(whole, (1 - BACKWARD_SHARE) * update.seconds)
        scattered = 0.0 if job.rank else parts.half_s(gradients, calls)
        gathering += _beyond(whole + scattered, BACKWARD_SHARE * update.seconds)
        scores = scoring.count * _beyond(whole, scoring.seconds)
        added = everyone.all_reduce_s(gradients, 1) if job.rank else copies.all_reduce_s(gradients / parts.size, calls)
        publish = whole if job.generates else 0.0
        return Communication(scores, job.epochs * update.count * gathering, _once(job, added), publish)
    if job.rank:
        return Communication(optimizer=_once(job, everyone.all_reduce_s(gradients, 1)))
    beside = BACKWARD_SHARE * update.seconds if overlap else 0.0
    early = 1 - shape.table / shape.parameters
    if place.shard == "none":
        summed = _beyond(everyone.all_reduce_s(early * gradients, calls - 1), beside)
        return Communication(optimizer=_once(job, summed + everyone.all_reduce_s((1 - early) * gradients, 1)))
    scattered = _beyond(parts.half_s(early * gradients, calls - 1), beside) + parts.half_s((1 - early) * gradients, 1)
    after = copies.all_reduce_s(gradients / parts.size, calls) + whole
    if place.shard == "gradients":
        return Communication(update=job.epochs * update.count * scattered, optimizer=_once(job, after))
    return Communication(optimizer=_once(job, scattered + after))


def of_shared_rows(
    job: Job, machine: Machine, place: Placement, updates: int, scorings: int, recompute: bool
) -> Communication:
    """What ranks that share micro-batches exchange for attention, which nothing hides. `updates`, `scorings`: micro-batches."""
    rows, backward = place.rows, 3 if recompute else 2

    def seconds(shape: ModelShape, ranks: int, passes: int, count: int) -> float:
        if ranks == 1 or not count:
            return 0.0
        length = round(job.typical_prompt + job.expected_completion)
        way = cheaper_way(shape.attention_sizes, ranks, [length], [None], job.itemsize)
        elements = sum(size.layers * exchanged(way, size, ranks) for size in shape.attention_sizes)
        tokens = job.expected_row.tokens * ranks / place.devices
        calls = (2 if way == "heads" else 1) * shape.layers * count
        return passes * row_group(machine, ranks).half_s(tokens * elements * job.itemsize, calls)

    old, others = int(job.old_logprobs), int(job.compared)
    kinds = max(1, old + others + int(job.critic is not None))
    score = old * seconds(job.shape, rows.policy, 1, scorings // kinds)
    score += others * seconds(job.shape, rows.reference, 1, scorings // kinds)
    update = seconds(job.shape, rows.policy, backward, updates) if job.training else 0.0
    if job.critic is not None:
        score += seconds(job.critic, rows.critic, 1, scorings // kinds)
        update += seconds(job.critic, rows.critic, backward, updates)
    return Communication(score, job.epochs * update)


def _once(job: Job, seconds: float) -> float:
    """Once an optimizer step, of which every pass over a batch has at least one."""
    return job.epochs * seconds if job.training else 0.0


def _beyond(seconds: float, beside: float) -> float:
    """What is left of a collective that runs beside a pass."""
    return seconds - min(HIDDEN_SHARE * seconds, beside)
