"""Measures two small micro-batches at the start of a run. A line through them corrects what was counted for this model, device
and set of versions; the host's time for the smaller one is the time of launching, which a micro-batch has to outlast. Budgets are
then chosen once more, before the first step. Takes about a second and changes no state.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from trimtab.config.known import ResolvedRun
from trimtab.config.run import Run
from trimtab.model.memory import Shortage, attempt, free
from trimtab.plan.activations import MicroBatchSize, update_peak
from trimtab.plan.job import NO_CORRECTION, Correction, Job
from trimtab.plan.ledger import update_path
from trimtab.plan.planner import Choice, Plan, make_plan, recompute_when_wider
from trimtab.run.tuner import longest_samples, settle
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.updater import Updater

SMALL_PROBE_TOKENS = 2048
"""Tokens of the smaller micro-batch; the other has twice as many."""
MIN_LEARNED_TOKENS = 128
"""Least tokens that are learned after the longest prompt."""
LAUNCHES_TIMED = 5
"""Times that launching is measured."""
PLAUSIBLE_RATIO = (0.5, 3.0)
"""Measured over counted bytes a token: outside these bounds something else was measured."""


def probe(updater: Updater, job: Job, run: ResolvedRun) -> Correction:
    """What corrects the count by what micro-batches really take; nothing is corrected where memory runs out on the way."""
    path, device = update_path(job, run), updater.policy.device
    small = max(min(SMALL_PROBE_TOKENS, run.token_budget // 2), job.typical_prompt + MIN_LEARNED_TOKENS)
    if 2 * small > run.token_budget:
        return NO_CORRECTION
    measured, counted, launch_s = [], [], None
    for tokens in (small, 2 * small):
        samples = list(longest_samples(job, tokens, job.shape.vocabulary))
        peak = attempt(_peak, updater, samples, device)
        if launch_s is None and not isinstance(peak, Shortage):
            launch_s = _host_seconds(updater, samples, device) / job.shape.layers
        updater.abandon()
        if isinstance(peak, Shortage):
            free(device)
            return NO_CORRECTION
        measured.append(peak)
        row = MicroBatchSize(*MicroBatch.build(samples, device).sizes)
        counted.append(sum(update_peak(job.shape, row, path).values()))
    slope = (measured[1] - measured[0]) / (counted[1] - counted[0])
    if not PLAUSIBLE_RATIO[0] < slope < PLAUSIBLE_RATIO[1]:
        return Correction(launch_s=launch_s)
    return Correction(slope, int(measured[0] - slope * counted[0]), launch_s)


def worst(found: Sequence[Correction]) -> Correction:
    """What holds for every one of several ranks, which all do the same: the most that any of them measured."""
    launches = [each.launch_s for each in found if each.launch_s is not None]
    factor, rest = max(each.factor for each in found), max(each.rest for each in found)
    return Correction(factor, rest, max(launches, default=None))


def _peak(updater: Updater, samples: list[Sample], device: torch.device) -> int:
    """Most bytes that a micro-batch takes beyond gradients and what was allocated before."""
    updater.rehearse(samples)  # compiles, and leaves gradients
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    updater.rehearse(samples)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _host_seconds(updater: Updater, samples: list[Sample], device: torch.device) -> float:
    """Seconds that the host takes to launch a micro-batch, which the device finishes sooner; the median of a few."""
    found = []
    for _ in range(LAUNCHES_TIMED):
        started = time.perf_counter()
        updater.rehearse(samples)
        found.append(time.perf_counter() - started)
        settle(device)
    return statistics.median(found)


def corrected(plan: Plan, asked: Run, found: Correction) -> Plan:
    """The plan with what was measured: automatic micro-batches and recomputing are chosen again, all else stays."""
    job = replace(plan.job, correction=found)
    open_keys = {key: getattr(asked, key) for key in ("token_budget", "score_token_budget", "checkpoint_activations")}
    again = make_plan(Run.model_validate(dict(plan.run) | open_keys), job, plan.machine, asked.profile)
    now, wider = plan.run.token_budget, again.run.token_budget
    if asked.checkpoint_activations == "auto" and again.run.checkpoint_activations is False and wider > now:
        recompute = {"checkpoint_activations": recompute_when_wider(replace(plan, job=job), now, wider)}
        again = make_plan(again.run.with_values(recompute), job, plan.machine, asked.profile)
    if not again.fits:  # the guard can give up more than a plan can
        return replace(plan, job=job)
    changed = {f"run.{key}": getattr(again.run, key) for key, value in open_keys.items() if value == "auto"}
    changed = {key: value for key, value in changed.items() if value != getattr(plan.run, key.removeprefix("run."))}
    why = "measured with two micro-batches"
    choices = [
        Choice(choice.key, changed[choice.key], why) if choice.key in changed else choice for choice in plan.choices
    ]
    return replace(again, choices=tuple(choices))
