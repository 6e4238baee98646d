"""The first half of a step: completions of the next prompts, with their rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from trimtab.base.errors import DivergedError
from trimtab.base.spans import log
from trimtab.config.schema import Config
from trimtab.data.prompt import Prompt
from trimtab.learn.parts import Part
from trimtab.observe.conversations import conversation_metrics
from trimtab.observe.judges import gather, judge_metrics
from trimtab.observe.metrics import rollout_metrics
from trimtab.reward.scorer import check_failures
from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.trajectory import Group
from trimtab.run.roles import Generator, Rewarder, Session
from trimtab.update.samples import split_signal, usable
from trimtab.workers.messages import Tally


def rollout(run: Session) -> tuple[list[Group], dict[str, float]]:
    """Sample a step's groups and score them; groups without signal are replaced where the algorithm says so."""
    learn = run.config.learn
    groups: list[Group] = []
    kept: list[Group] = []
    seen: Counter[int] = Counter()
    refills = repeated = 0
    all_calls, latency_s = RolloutStats(), 0.0
    judged: list[dict[str, Tally]] = []
    while True:
        prompts = run.data.stream.take(learn.prompts_per_step - len(kept))
        new = sample(run, prompts, seen)
        all_calls.add(run.generator.stats)
        latency_s = max(latency_s, run.rewarder.stats.latency_max_s)
        repeated += run.rewarder.stats.repeated
        judged.append(run.rewarder.stats.judges)
        groups += new
        check_failures(groups, run.config.observe.max_failed_rewards)
        wanted = learn.dynamic_sampling.enabled
        kept += split_signal(usable(new)[0], learn, reward_parts(run.config, run.rewarder))[0] if wanted else new
        if len(kept) >= learn.prompts_per_step or refills == learn.dynamic_sampling.max_refills:
            break
        refills += 1
    run.state.completion_tokens += all_calls.generated_tokens
    metrics = rollout_metrics(all_calls)
    metrics |= {
        "rollout/refills": float(refills),
        "reward/latency_max_s": latency_s,
        "reward/repeated": float(repeated),
    }
    return groups, metrics | judge_metrics(gather(judged)) | conversation_metrics(groups, all_calls.wait_s)


def sample(run: Session, prompts: list[Prompt], seen: Counter[int]) -> list[Group]:
    """Completions of the prompts, scored. `seen`: how often each prompt was sampled in this step already."""
    learn = run.config.learn
    requests = []
    for prompt in prompts:
        first = seen[prompt.id] * learn.samples_per_prompt
        seen[prompt.id] += 1
        requests.append(
            Request(
                prompt,
                learn.samples_per_prompt,
                learn.max_new_tokens,
                learn.sampling,
                learn.seed,
                run.state.step,
                first,
            )
        )
    return _generate(run, requests)


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


def _generate(run: Session, requests: list[Request]) -> list[Group]:
    """Reward workers start on a group while others are still decoding."""
    with run.observer.phase("rollout", memory="rollout"):
        for group in counted(run.generator, requests):
            run.rewarder.submit(group)
    with run.observer.phase("reward", memory="rollout"):  # a reward model works beside the engine
        # In the order they were asked for: the order they finish in depends on the schedule, and a batch must not.
        groups = sorted(run.rewarder.collect(), key=lambda group: group.index)
    if not torch.cat([t.logprobs for group in groups for t in group.trajectories]).isfinite().all():
        raise DivergedError(
            f"step {run.state.step + 1}: the policy's log-probs are not finite. Its weights are too large, or "
            "learn.sampling.temperature is too small. Lower learn.lr, and resume from the last checkpoint or start again."
        )
    return groups
