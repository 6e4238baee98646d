"""Measures on the device what a plan can only predict, with sequences as long as they may be, and takes the fastest.

A micro-batch size is tried by a forward and a backward pass of a full micro-batch that is not applied; the batch in flight by
decoding a few tokens. Sizes are doubled while that pays and fits, and halved while they do not fit or halving pays. Running out
of memory ends a try and nothing else. Of sizes within a hundredth of the fastest, the smallest is taken: memory has other uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch

from trimtab.cluster.ranks import Ranks
from trimtab.cluster.updater import RankedUpdater
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.model.memory import Shortage, attempt, free
from trimtab.plan.job import Job
from trimtab.plan.trials import Trial, Tuned
from trimtab.rollout.engine import Engine, Request
from trimtab.update.batch import Sample
from trimtab.update.updater import Updater

MIN_SPEEDUP = 1.01
"""A size pays if it is at least this many times as fast as the one before."""
MICROBATCHES_TIMED_TOGETHER = 3
"""Micro-batches that are timed together."""
UPDATES_TIMED, DECODES_TIMED = 2, 3
"""Times that a size is timed; the best counts."""
DECODED_TOKENS = 32
"""Tokens of each sequence when decoding is timed."""


class Tries(Protocol):
    """What can be tried, on one device or on all ranks at once."""

    engine: Engine
    token_budget: int
    """The updater's own."""

    def update(self, budget: int) -> Trial:
        """Micro-batches of so many tokens. Changes no weight."""
        ...

    def decode(self, sequences: int) -> Trial:
        """So many sequences at a time, on each device."""
        ...


class LocalTries:
    """Tries on the device of this process."""

    def __init__(self, updater: Updater, engine: Engine, job: Job) -> None:
        self.engine, self.token_budget = engine, updater.token_budget
        self.update = partial(time_update, updater, job)
        self.decode = partial(time_decode, engine, job)


class RankTries:
    """Tries on all ranks at once; a size is as fast as on the slowest of them, and fits if it fits on all."""

    def __init__(self, ranks: Ranks, updater: RankedUpdater, engine: Engine, job: Job) -> None:
        self.engine, self.token_budget = engine, updater.token_budget
        self._ranks, self._updater, self._job = ranks, updater, job

    def update(self, budget: int) -> Trial:
        outcome = attempt(self._ranks.ask, "time_update", self._job, budget)
        self._updater.abandon()
        if isinstance(outcome, Shortage):
            return Trial("token_budget", budget, None, None)
        return slowest(outcome)

    def decode(self, sequences: int) -> Trial:
        tried = self._ranks.ask("time_decode", self._job, sequences)
        return slowest([trial for trial in tried if trial is not None])  # or it has no engine


def slowest(trials: Sequence[Trial]) -> Trial:
    """The same try on several ranks as one."""
    rates = [trial.rate for trial in trials]
    peaks = [trial.peak for trial in trials if trial.peak is not None]
    rate = None if None in rates else min(rate for rate in rates if rate is not None)
    return Trial(trials[0].key, trials[0].value, rate, max(peaks, default=None))


def tune(tries: Tries, job: Job, most_sequences: int, report: Callable[[Trial], None] = lambda trial: None) -> Tuned:
    """Try budgets from the updater's own, and batches from `most_sequences`; sets nothing."""
    trials: list[Trial] = []

    def noted(trial: Trial) -> Trial:
        trials.append(trial)
        report(trial)
        return trial

    tries.engine.publish(0)
    batches = climb(most_sequences, max(1, most_sequences // 8), most_sequences, lambda n: noted(tries.decode(n)))
    tries.engine.lend()
    whole = max(job.longest_trained, job.step_row.tokens)
    least = min(tries.token_budget, job.longest_trained)  # less, where devices share a sequence
    budgets = climb(min(tries.token_budget, whole), least, whole, lambda n: noted(tries.update(n)))
    return Tuned(fastest(budgets), fastest(batches), tuple(trials))


def climb(start: int, least: int, most: int, measure: Callable[[int], Trial]) -> list[Trial]:
    """Double while that fits and pays. Where the start did not fit, or doubling did not pay at once, halve while that helps."""
    found = [measure(start)]
    for step, limit in ((2.0, most), (0.5, least)):
        before = found[0]
        value = before.value
        while True:
            value = int(value * step)
            beyond = value > limit if step > 1 else value < limit
            if beyond or (step > 1 and before.rate is None):
                break
            now = measure(value)
            found.append(now)
            if now.rate is not None and before.rate is not None and now.rate < MIN_SPEEDUP * before.rate:
                break
            if now.rate is None and step > 1:
                break
            before = now
        if len(found) > 2 and step > 1:
            break  # doubling paid: halving would not
    return found


def fastest(trials: list[Trial]) -> int:
    """The smallest size within a hundredth of the best; the smallest tried where none fitted."""
    fitting = [trial for trial in trials if trial.rate is not None]
    if not fitting:
        return min(trial.value for trial in trials)
    best = max(trial.rate or 0.0 for trial in fitting)
    return min(trial.value for trial in fitting if (trial.rate or 0.0) * MIN_SPEEDUP >= best)


def time_update(updater: Updater, job: Job, budget: int) -> Trial:
    """Micro-batches of so many tokens, or that they do not fit. Gradients are gone afterwards."""
    outcome = attempt(timed_update, updater, job, budget)
    updater.abandon()
    if isinstance(outcome, Shortage):
        device = updater.policy.device
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        free(device)
        return Trial("token_budget", budget, None, peak)
    return outcome


def timed_update(updater: Updater, job: Job, budget: int) -> Trial:
    """Tokens a second of full micro-batches one after the other, with gradients already there, as in a step: the host prepares
    one while the device works on another. The best of a few, as others may use the machine too."""
    device = updater.policy.device
    group = updater.policy.sequence
    whole = budget if group is None else budget * group.ranks
    samples = list(longest_samples(job, whole, updater.policy.config.vocab_size))
    tokens = job.row(whole).tokens * budget // whole

    def once() -> float:
        started = time.perf_counter()
        for _ in range(MICROBATCHES_TIMED_TOGETHER):
            updater.rehearse(samples)
        settle(device)
        return (time.perf_counter() - started) / MICROBATCHES_TIMED_TOGETHER

    updater.rehearse(samples)  # compiles, and leaves gradients
    settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = min([once() for _ in range(UPDATES_TIMED)])
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Trial("token_budget", budget, tokens / seconds, peak)


def time_decode(engine: Engine, job: Job, sequences: int) -> Trial:
    """Tokens per second of this many sequences at a time, with the longest prompts of the data; the best of a few tries."""
    groups = max(1, sequences // job.samples)
    samples = min(job.samples, sequences)
    numbers = torch.Generator().manual_seed(0)
    words = torch.randint(0, job.shape.vocabulary, (groups, job.typical_prompt), generator=numbers).tolist()
    requests = [
        Request(Prompt(i, "", row), samples, min(DECODED_TOKENS, job.completion), Sampling(), seed=0, step=0)
        for i, row in enumerate(words)
    ]
    before = dict(engine.lowered)
    rates = []
    for _ in range(1 + DECODES_TIMED):  # the first makes graphs
        for _ in engine.generate(requests):
            pass
        rates.append(engine.stats.generated_tokens / max(1e-9, engine.stats.decode_s))
    fitted = engine.lowered == before  # an engine that runs out of memory goes on with fewer at a time
    return Trial("max_sequences", sequences, max(rates[1:]) if fitted else None)


def longest_samples(job: Job, budget: int, vocabulary: int) -> Iterator[Sample]:
    """Groups of random tokens, as long as they may be, that fill a micro-batch; the last group as far as it fits."""
    numbers, used = torch.Generator().manual_seed(0), 0
    while True:
        prompt = torch.randint(0, vocabulary, (job.typical_prompt,), generator=numbers).tolist()
        used += len(prompt)
        for _ in range(job.samples):
            length = min(job.completion, budget - used)
            if length < 1:
                return
            tokens = torch.randint(0, vocabulary, (length,), generator=numbers)
            ones = torch.ones(length)
            yield Sample(prompt, tokens, ones, ones / budget, torch.zeros(length))
            used += length


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
