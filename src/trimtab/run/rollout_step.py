"""The first half of a step: completions of the next prompts, with their rewards. When a batch is sampled: buffer.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from trimtab.base.errors import DivergedError
from trimtab.base.spans import log
from trimtab.config.schema import Config
from trimtab.data.curriculum import keeps
from trimtab.data.prompt import Prompt
from trimtab.learn.parts import Part
from trimtab.observe.conversations import conversation_metrics
from trimtab.observe.judges import gather, judge_metrics
from trimtab.observe.metrics import rollout_metrics
from trimtab.record.batches import SampledBatch
from trimtab.reward.scorer import check_failures
from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.trajectory import Group
from trimtab.run.roles import Generator, Rewarder, Session
from trimtab.update.samples import split_signal, usable
from trimtab.workers.messages import Tally

Phase = Callable[..., AbstractContextManager[None]]
"""Says whose time a block is (`Observer.phase`)."""


def sample_batch(run: Session, step: int, phase: Phase) -> SampledBatch:
    """Completions of the next prompts. Their rewards are under way, or there where groups without signal are replaced."""
    learn, batch = run.config.learn, SampledBatch(step)
    seen: Counter[int] = Counter()
    calls, judged, kept, refills = RolloutStats(), list[dict[str, Tally]](), 0, 0
    stream, keep = run.data.stream, None
    if run.config.data.curriculum == "pass_rate":
        keep = keeps(run.state.pass_rates, learn.seed, step, learn.staleness)
    passed_over = stream.passed_over
    while True:
        groups = sample(run, stream.take(learn.prompts_per_step - kept, keep), seen, step, phase)
        calls.add(run.generator.stats)
        batch.groups += groups
        if not learn.dynamic_sampling.enabled:
            break
        score_batch(run, batch, phase, judged)
        kept += len(split_signal(usable(groups)[0], learn, reward_parts(run.config, run.rewarder))[0])
        if kept >= learn.prompts_per_step or refills == learn.dynamic_sampling.max_refills:
            break
        refills += 1
    run.state.completion_tokens += calls.generated_tokens
    batch.metrics |= rollout_metrics(calls) | {"rollout/refills": float(refills)}
    if keep is not None:
        batch.metrics["rollout/passed_over"] = float(stream.passed_over - passed_over)
    batch.metrics |= conversation_metrics(batch.groups, calls.wait_s)
    return batch


def score_batch(run: Session, batch: SampledBatch, phase: Phase, judged: list[dict[str, Tally]] | None = None) -> None:
    """Wait for the rewards of a batch. `judged`: what judges counted for its groups before the latest."""
    with phase("reward", memory="rollout"):  # a reward model works beside the engine
        run.rewarder.collect(batch.groups)
    check_failures(batch.groups, run.config.observe.max_failed_rewards)
    stats, known = run.rewarder.stats, batch.metrics
    judged = [] if judged is None else judged
    judged.append(stats.judges)
    batch.metrics |= {
        "reward/latency_max_s": max(stats.latency_max_s, known.get("reward/latency_max_s", 0.0)),
        "reward/repeated": stats.repeated + known.get("reward/repeated", 0.0),
    } | judge_metrics(gather(judged))
    batch.scored = True


def sample(run: Session, prompts: list[Prompt], seen: Counter[int], step: int, phase: Phase) -> list[Group]:
    """Completions of the prompts, whose rewards are being computed. `seen`: how often each prompt was sampled for this batch."""
    learn = run.config.learn
    requests = []
    for prompt in prompts:
        first = seen[prompt.id] * learn.samples_per_prompt
        seen[prompt.id] += 1
        requests.append(
            Request(prompt, learn.samples_per_prompt, learn.max_new_tokens, learn.sampling, learn.seed, step, first)
        )
    return _generate(run, requests, phase)


def counted(generator: Generator, requests: Sequence[Request]) -> Iterator[Group]:
    """What is generated; how much of it is there is told as it comes."""
    done, total = 0, sum(request.samples for request in requests)
    log.progress = (done, total, "samples")
    for group in generator.generate(requests):
        done += len(group.trajectories)
        log.progress = (done, total, "samples")
        yield group


def reward_parts(config: Config, rewarder: Rewarder) -> list[Part]:
    """How the reward's parts are summed."""
    return [Part(name, part.weight, part.normalize) for name, part in zip(rewarder.names, config.reward)]


def _generate(run: Session, requests: list[Request], phase: Phase) -> list[Group]:
    """Reward workers start on a group while others are still decoding."""
    groups = []
    with phase("rollout", memory="rollout"):
        for group in counted(run.generator, requests):
            run.rewarder.submit(group)
            groups.append(group)
    if not torch.cat([t.logprobs for group in groups for t in group.trajectories]).isfinite().all():
        raise DivergedError(
            f"step {run.state.step + 1}: the policy's log-probs are not finite. Its weights are too large, or "
            "learn.sampling.temperature is too small. Lower learn.lr, and resume from the last checkpoint or start again."
        )
    # In the order they were asked for: the order they finish in depends on the schedule, and a batch must not.
    return sorted(groups, key=lambda group: group.index)
