"""The run: rollout -> reward -> advantages -> update -> publish -> observe, once a step.

Every completion that was sampled is trained on or dropped with a reason, and the counts add up each step (`Ledger.check`).
A step that is killed anywhere leaves the last checkpoint as it was, and repeats the same way from there; one that is stopped, or
fails, leaves a checkpoint of the last whole step (keeping.py).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch

from trimtab.base.errors import DivergedError
from trimtab.base.signals import newly_waiting
from trimtab.config.algorithms import GROUP_ADVANTAGES
from trimtab.data.prompt import Prompt
from trimtab.learn.kl import kl_controller
from trimtab.learn.parts import Part
from trimtab.observe.conversations import conversation_metrics
from trimtab.observe.judges import gather, judge_metrics
from trimtab.observe.metrics import reward_metrics, rollout_metrics, update_metrics, value_metrics
from trimtab.observe.tasks import task_kl, task_metrics
from trimtab.record.checkpoint import RunState, save_checkpoint
from trimtab.record.samples import write_samples
from trimtab.reward.scorer import check_failures
from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.trajectory import Group
from trimtab.run.endings import export, is_due, look_back, note_outcome
from trimtab.run.evaluation import measure, success_threshold
from trimtab.run.keeping import Keeper, keeping
from trimtab.run.session import Session
from trimtab.update.batch import Sample
from trimtab.update.critic import critic_files
from trimtab.update.objective import (
    Ledger,
    in_loss,
    set_advantages,
    set_weights,
    split_signal,
    to_samples,
    usable,
)
from trimtab.update.optimizer import learning_rate
from trimtab.update.updater import UpdateStats
from trimtab.workers.messages import Tally


def train(run: Session) -> dict[str, Any]:
    """Train from the session's state to the last step; returns the summary."""
    optimizers = [updater.optimizer for updater in (run.updater, run.critic) if updater is not None]
    with keeping(run, run.config.learn.steps, optimizers, partial(_save, run)) as keeper:
        _train(run, keeper)
    return finish(run)


def _train(run: Session, keeper: Keeper) -> None:
    learn, observe, state = run.config.learn, run.config.observe, run.state
    if not run.resumed:
        evaluate(run)
        run.timeline.end_step(0)
    elif state.eval_due:
        keeper.evaluate_again(lambda: evaluate(run))
    while state.step < learn.steps:
        recovered = state.oom_recoveries
        groups, metrics = rollout(run)
        with run.timeline.phase("publish"):
            run.engine.lend()
        metrics |= update(run, groups)
        number = state.step + 1
        due = bool(run.eval_prompts) and is_due(number, observe.eval_every, learn.steps)
        keeper.finish(metrics, metrics["rollout/tokens"], recovered, run.stream.position, due)
        with run.timeline.phase("publish"):
            run.guard.run("publish", lambda: run.engine.publish(state.version))
        if due:
            metrics |= evaluate(run)
            keeper.evaluated()
        if observe.samples_every and (is_due(number, observe.samples_every, learn.steps) or number == 1):
            write_samples(run.folder, number, groups)
        keeper.end_step()


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
        prompts = run.stream.take(learn.prompts_per_step - len(kept))
        new = sample(run, prompts, seen)
        all_calls.add(run.sampler.stats)
        latency_s = max(latency_s, run.scorer.stats.latency_max_s)
        repeated += run.scorer.stats.repeated
        judged.append(run.scorer.stats.judges)
        groups += new
        check_failures(groups, run.config.observe.max_failed_rewards)
        kept += split_signal(usable(new)[0], learn, _parts(run))[0] if learn.dynamic_sampling.enabled else new
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
    """Completions of the prompts, scored. Reward workers start on a group while others are still decoding."""
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


def update(run: Session, groups: list[Group]) -> dict[str, float]:
    """Learn from scored groups: one optimizer step for each part of the batch in each epoch."""
    kept, samples, metrics = _sort_out(run, groups)
    if not metrics["run/samples_trained"]:
        why = "all completions were cut off (learn.mask_truncated)" if kept else "no group has a usable reward"
        run.console.warn(f"step {run.state.step + 1}: {why}; nothing is learned from it")
        return metrics
    all_samples = [sample for group in samples for sample in group]
    with run.timeline.phase("score"), run.meter.phase("score"):
        _score(run, all_samples)
        set_advantages(kept, samples, run.config.learn, run.state.kl_coef, _parts(run))
    with run.timeline.phase("update"), run.meter.phase("update"):
        done, valued = _optimize(run, kept, samples)
    if valued:
        metrics |= value_metrics(all_samples, valued)
    if done and run.reference is not None:
        metrics["policy/kl_coef"] = run.state.kl_coef
        _control_kl(run, done[0], len(all_samples))
        if run.tasks is not None:
            first_epoch = done[: len(done) // run.config.learn.epochs_per_step]
            metrics |= task_kl(run.tasks, kept, samples, first_epoch)
    if done:
        last = run.config.learn.updates_per_batch - 1
        metrics |= update_metrics(done) | {"policy/lr": learning_rate(run.config.learn, run.state.step, last)}
    return metrics


def _sort_out(run: Session, groups: list[Group]) -> tuple[list[Group], list[list[Sample]], dict[str, float]]:
    """The groups to learn from, their samples, and what the rewards were; every sample is trained or dropped for a reason."""
    learn = run.config.learn
    ledger = Ledger(sum(len(group.trajectories) for group in groups), 0, Counter())
    kept, ledger.dropped = usable(groups)
    # Elsewhere a group of equal rewards teaches as much as any other: it is not compared with itself.
    zero_signal = split_signal(kept, learn, _parts(run))[1] if learn.advantage in GROUP_ADVANTAGES else None
    if learn.dynamic_sampling.enabled:
        assert zero_signal is not None, "refused with any other advantage"
        gone = {id(group) for group in zero_signal}
        kept = [group for group in kept if id(group) not in gone]
        ledger.dropped["no_signal"] = sum(len(group.trajectories) for group in zero_signal)
    samples = to_samples(kept)
    masked = sum(not in_loss(trajectory, learn) for group in kept for trajectory in group.trajectories)
    if masked:
        ledger.dropped["truncated"] = masked
    ledger.trained = sum(map(len, samples)) - masked
    ledger.check()
    metrics = reward_metrics(groups, run.scorer.names, zero_signal, ledger)
    if run.tasks is not None:
        metrics |= task_metrics(run.tasks, groups, zero_signal)
    run.state.note_reward(metrics["reward/mean"])
    return kept, samples, metrics


def _optimize(
    run: Session, kept: list[Group], samples: list[list[Sample]]
) -> tuple[list[UpdateStats], list[UpdateStats]]:
    """All optimizer steps of the batch, of the policy and of the critic. In the critic's warm-up the policy has none."""
    learn, state = run.config.learn, run.state
    done: list[UpdateStats] = []
    valued: list[UpdateStats] = []
    warm = run.critic is None or state.step >= learn.critic.warmup_steps
    for epoch in range(learn.epochs_per_step):
        parts = np.array_split(np.arange(len(kept)), min(learn.updates_per_step, len(kept)))
        for number, part in enumerate(parts, epoch * learn.updates_per_step):
            flat = [sample for group in part for sample in samples[group]]
            set_weights([trajectory for group in part for trajectory in kept[group].trajectories], flat, learn)
            flat = [sample for sample in flat if sample.weights.any()]  # without a share nothing needs to be computed
            if not flat:
                continue
            if run.critic_guard is not None:
                valued.append(
                    run.critic_guard.step(flat, learning_rate(learn, state.step, number, learn.critic.lr), 0.0)
                )
                if not valued[-1].applied:
                    run.console.warn(f"step {state.step + 1}: the critic's gradient is not finite; it is unchanged")
            if not warm:
                continue
            done.append(run.guard.step(flat, learning_rate(learn, state.step, number), state.kl_coef))
            note_outcome(state, done[-1], run.console, "at RUN/samples for what the model has come to write")
            if stop := newly_waiting():
                run.console.note(f"{stop}: the run stops when the updates of step {state.step + 1} are done")
            run.watch.saw(
                done[-1].sizes,
                run.updater.checkpoint_activations,
                run.updater.logprob_chunk,
                run.policy.shelf is not None,
            )
    return done, valued


def _control_kl(run: Session, first: UpdateStats, trained: int) -> None:
    """Set the coefficient for the next step, from the distance to the reference that this one began with."""
    kl = run.config.learn.kl
    found = first.mean("kl_ref")
    if math.isfinite(found):  # or the update was not applied, and is told of as that
        run.state.kl_coef = kl_controller(run.state.kl_coef, kl.target, kl.horizon).update(found, trained).coef


def evaluate(run: Session) -> dict[str, float]:
    """Held-out scores of the current policy; remembers the best and the first."""
    state = run.state
    if not run.eval_prompts:
        return {}
    with run.timeline.phase("eval"), run.meter.phase("rollout"):
        result, groups = measure(run.config, run.eval_prompts, run.sampler, run.scorer, run.tasks)
    accuracy = result.get("eval/pass@1", result.get("eval/score"))
    if accuracy is not None:
        state.note_accuracy(accuracy)
    run.console.eval(state.step, result)
    write_samples(run.folder / "eval", state.step, groups)
    if state.step == 0:
        run.sinks.write(0, result)
    return result


def finish(run: Session) -> dict[str, Any]:
    """Export the final model and sum the run up."""
    state = run.state
    run.console.waiting("writing the final model")
    export(run.folder, run.policy, run.tokenizer, run.guard)
    summary = {
        "run_dir": str(run.folder),
        "steps": state.step,
        "reward_first": state.reward_first,
        "reward_last": state.reward_last,
        "eval": {"before": state.accuracy_first, "after": state.accuracy_last, **_measured(run)},
        "tokens_per_s": state.completion_tokens / max(state.seconds, 1e-9),
        "peak_gib": run.meter.peak_gib,
        "seconds": round(state.seconds, 2),
    }
    run.console.finish(summary)
    look_back(run.folder, run.console)
    return summary


def _measured(run: Session) -> dict[str, str]:
    """What evaluation measures, where it is not pass@1."""
    return {"measure": "score"} if success_threshold(run.config, run.scorer.names) is None else {}


def _generate(run: Session, requests: list[Request]) -> list[Group]:
    with run.timeline.phase("rollout"), run.meter.phase("rollout"):
        for group in run.sampler.generate(requests):
            run.scorer.submit(group)
    with run.timeline.phase("reward"), run.meter.phase("rollout"):  # a reward model works beside the engine
        # In the order they were asked for: the order they finish in depends on the schedule, and a batch must not.
        groups = sorted(run.scorer.collect(), key=lambda group: group.index)
    if not torch.cat([t.logprobs for group in groups for t in group.trajectories]).isfinite().all():
        raise DivergedError(
            f"step {run.state.step + 1}: the policy gives log-probs that are no numbers. Its weights have grown too large, or "
            "learn.sampling.temperature is too small. Lower learn.lr, and resume from the last checkpoint or start again."
        )
    return groups


def _parts(run: Session) -> list[Part]:
    """How the reward's parts are summed."""
    return [Part(name, part.weight, part.normalize) for name, part in zip(run.scorer.names, run.config.reward)]


def _save(run: Session, state: RunState) -> None:
    keep = run.config.observe.keep_checkpoints
    others = None if run.critic is None else critic_files(run.critic)
    save_checkpoint(run.folder, state, run.policy.model, run.tokenizer, run.updater.optimizer, keep, others)


def _score(run: Session, samples: list[Sample]) -> None:
    """Log-probs that the objective needs and that the update itself will not produce."""
    learn = run.config.learn
    if learn.updates_per_batch > 1:
        if learn.old_logprobs == "engine":
            for sample in samples:
                sample.old_logprobs = sample.engine_logprobs
        else:
            run.guard.score(samples, run.policy, "old_logprobs")
    if run.reference is not None:
        run.guard.score(samples, run.reference, "ref_logprobs")
    if run.critic is not None and run.critic_guard is not None:
        run.critic_guard.score(samples, run.critic.policy, "values")
