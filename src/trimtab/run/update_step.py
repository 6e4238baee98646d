"""The second half of a step: what was sampled changes the policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trimtab.base.signals import newly_waiting
from trimtab.config.known import ResolvedLearn
from trimtab.config.learn import KL
from trimtab.data.curriculum import note_rate
from trimtab.learn.kl import kl_controller
from trimtab.learn.segments import sum_by
from trimtab.observe.metrics import reward_metrics, update_metrics, value_metrics
from trimtab.observe.tasks import task_kl, task_metrics
from trimtab.record.distributions import distributions
from trimtab.rollout.trajectory import Group
from trimtab.run.evaluation import success_threshold
from trimtab.run.finish_step import note_outcome
from trimtab.run.roles import Session, Trainer
from trimtab.run.rollout_step import reward_parts
from trimtab.run.side_by_side import side_by_side
from trimtab.update.batch import Sample
from trimtab.update.samples import (
    Batch,
    has_critic,
    has_reference,
    optimizer_steps,
    set_advantages,
    sort_out,
    with_gradient,
)
from trimtab.update.schedule import learning_rate
from trimtab.update.stats import Scored, Trained, UpdateStats


def update(run: Session, groups: list[Group]) -> dict[str, float]:
    """Learn from scored groups, and write down how they are spread."""
    metrics = _learn(run, groups)
    if run.config.data.curriculum == "pass_rate":
        _note_rates(run, groups)
    run.observer.distributed(_spread(run, groups))
    return metrics


def _note_rates(run: Session, groups: list[Group]) -> None:
    """How each prompt's samples did, for the prompts of later steps."""
    names, state = run.rewarder.names, run.state
    threshold, part = success_threshold(run.config, names), run.config.eval.part or names[0]
    assert threshold is not None, "refused before"
    for group in groups:
        values = [t.rewards[part] for t in group.trajectories if part in t.rewards]
        if values:
            rate = sum(value >= threshold for value in values) / len(values)
            note_rate(state.pass_rates, group.prompt.id, state.step, rate, run.config.learn.staleness)


def _spread(run: Session, groups: list[Group]) -> dict[str, Any]:
    """A right completion is one that evaluation would call right."""
    config, names = run.config, run.rewarder.names
    threshold, part = success_threshold(config, names), config.eval.part or names[0]
    everyone = [t for group in groups for t in group.trajectories]
    rights = None
    if threshold is not None:
        rights = [sum(t.rewards.get(part, -math.inf) >= threshold for t in group.trajectories) for group in groups]
    return distributions(
        run.state.step + 1,
        [len(t) for t in everyone],
        config.learn.max_new_tokens,
        [t.reward for t in everyone if t.reward is not None],
        [t.advantage for t in everyone if t.advantage is not None],
        rights,
        config.learn.samples_per_prompt,
    )


def _learn(run: Session, groups: list[Group]) -> dict[str, float]:
    """One optimizer step for each part of the batch in each epoch."""
    learn, state, tasks = run.config.learn, run.state, run.data.tasks
    parts = reward_parts(run.config, run.rewarder)
    older = any(int(t.versions.min()) < state.version for group in groups for t in group.trajectories if len(t))
    batch = sort_out(groups, learn, parts)
    metrics = reward_metrics(groups, run.rewarder.names, batch.zero_signal, batch.counts)
    if tasks is not None:
        metrics |= task_metrics(tasks, groups, batch.zero_signal)
    state.note_reward(metrics["reward/mean"])
    if not batch.counts.trained:
        why = (
            "every completion is truncated, and learn.mask_truncated drops those"
            if batch.groups
            else "no group has a usable reward"
        )
        run.observer.warn(f"step {state.step + 1}: {why}; the step learns nothing")
        return metrics
    samples = batch.flat
    with run.observer.phase("score", memory="score"):
        score(run.trainer, samples, learn)
        set_advantages(batch.groups, batch.samples, learn, state.kl_coef, parts)
        _note_advantages(batch)
    with run.observer.phase("update", memory="update"):
        steps, valued = _optimize(run, batch)
    done = [stats for _, stats in steps]
    if valued:
        metrics |= value_metrics(samples, valued)
    if done and has_reference(learn):
        metrics["policy/kl_coef"] = state.kl_coef
        state.kl_coef = next_kl_coef(learn.kl, state.kl_coef, done[0], len(samples))
        if tasks is not None:
            metrics |= task_kl(tasks, batch.groups, batch.samples, steps[: len(steps) // learn.epochs_per_step])
    if done:
        last = learn.updates_per_batch - 1
        metrics |= update_metrics(done) | {"policy/lr": learning_rate(learn, state.step, last)}
        if older:  # the gap is that of two policies, and says nothing of the engine
            metrics["rollout/stale_gap"] = metrics.pop("rollout/logprob_gap")
    return metrics


def _note_advantages(batch: Batch) -> None:
    """Into the completions, for whoever reads samples."""
    trajectories = [t for group in batch.groups for t in group.trajectories]
    flat = batch.flat
    lengths = torch.tensor([sample.advantages.shape[0] for sample in flat])
    means = segment_mean(torch.cat([sample.advantages for sample in flat]), lengths)
    for trajectory, mean in zip(trajectories, means, strict=True):
        trajectory.advantage = mean


def segment_mean(values: torch.Tensor, lengths: torch.Tensor) -> list[float]:
    """The mean of each of several stretches that lie one after the other; 0 of an empty one."""
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    found: list[float] = (sum_by(values.double(), index, len(lengths)) / lengths.clamp(min=1)).tolist()
    return found


def score(trainer: Trainer, samples: list[Sample], learn: ResolvedLearn) -> None:
    """What the objective needs to know of the samples and the update itself will not produce."""
    wanted: list[tuple[Scored, str]] = []
    if learn.updates_per_batch > 1:
        if learn.old_logprobs == "engine":
            for sample in samples:
                sample.old_logprobs = sample.engine_logprobs
        else:
            wanted.append(("policy", "old_logprobs"))
    if has_reference(learn):
        wanted.append(("reference", "ref_logprobs"))
    if has_critic(learn):
        wanted.append(("critic", "values"))
    side_by_side([(trainer.place_of(by), partial(trainer.score, samples, field, by)) for by, field in wanted])


def next_kl_coef(kl: KL, coef: float, first: UpdateStats, trained: int) -> float:
    """The coefficient of the next step, from the distance to the reference that this one began with."""
    found = first.mean("kl_ref")
    if not math.isfinite(found):  # the update was not applied, and is told of as that
        return coef
    return kl_controller(coef, kl.target, kl.horizon).update(found, trained).coef


def _optimize(run: Session, batch: Batch) -> tuple[list[tuple[list[Sample], UpdateStats]], list[UpdateStats]]:
    """All optimizer steps of the batch: those of the policy with their samples, and those of the critic. In the critic's warm-up
    the policy has none."""
    learn, state, trainer, observer = run.config.learn, run.state, run.trainer, run.observer
    done: list[tuple[list[Sample], UpdateStats]] = []
    valued: list[UpdateStats] = []
    warming = has_critic(learn) and state.step < learn.critic.warmup_steps
    for number, samples in optimizer_steps(batch, learn):
        works: list[tuple[int, Callable[[], UpdateStats]]] = []
        passed = with_gradient(samples, learn)
        if has_critic(learn):
            rate = learning_rate(learn, state.step, number, learn.critic.lr)
            works.append((trainer.place_of("critic"), partial(_step, trainer, samples, 0.0, rate, "critic")))
        if not warming:
            rate = learning_rate(learn, state.step, number)
            works.append((trainer.place_of("policy"), partial(_step, trainer, passed, state.kl_coef, rate, "policy")))
        found = side_by_side(works)
        if has_critic(learn):
            valued.append(found[0])
            if not valued[-1].applied:
                observer.warn(f"step {state.step + 1}: the critic's gradient is not finite, so its update is skipped")
        if warming:
            continue
        stats = found[-1]
        stats.without_gradient = len(samples) - len(passed)
        done.append((samples, stats))
        note_outcome(state, stats, observer, "at RUN/samples for what the model writes")
        if stop := newly_waiting():
            observer.note(f"{stop} received: stopping after the updates of step {state.step + 1}")
        observer.saw(stats, trainer.settings)
    return done, valued


def _step(trainer: Trainer, samples: list[Sample], kl_coef: float, rate: float, model: Trained) -> UpdateStats:
    return trainer.accumulate(samples, kl_coef, model).complete(trainer.apply(rate, model))
