"""The run: rollout -> reward -> advantages -> update -> publish -> observe, once a step.

What is learned from was sampled `learn.staleness` steps before, and waits in the session meanwhile (buffer.py).
Every completion that was sampled is trained on or dropped with a reason, and the counts add up each step (`SampleCounts.check`).
A step that is killed anywhere leaves the last checkpoint as it was, and repeats the same way from there; one that is stopped, or
fails, leaves a checkpoint of the last whole step (save_on_stop.py).
"""

from __future__ import annotations

from typing import Any

from trimtab.run.evaluation import measure, outcomes, success_threshold
from trimtab.run.finish_step import is_due
from trimtab.run.roles import Session
from trimtab.run.save_on_stop import StepSaver, save_on_stop
from trimtab.run.update_step import update


def train(run: Session) -> dict[str, Any]:
    """Train from the session's state to the last step; returns the summary."""
    with save_on_stop(run, run.config.learn.steps) as saver:
        _train(run, saver)
    return finish(run)


def _train(run: Session, saver: StepSaver) -> None:
    learn, observe, state, observer = run.config.learn, run.config.observe, run.state, run.observer
    if not state.step:
        first = evaluate(run)
        observer.end_phases(0)
        if first:
            observer.write(0, first)
    elif state.eval_due:
        saver.evaluate_again(lambda: evaluate(run))
    while state.step < learn.steps:
        recovered, number = state.oom_recoveries, state.step + 1
        batch = run.buffer.next(run)
        metrics = batch.metrics
        saver.settle_written()
        with observer.phase("publish"):
            run.generator.lend()
        metrics |= update(run, batch.groups)
        run.buffer.settle(run)
        due = bool(run.data.held_out) and is_due(number, observe.eval_every, learn.steps)
        saver.finish(metrics, metrics["rollout/tokens"], recovered, run.data.stream.position, due)
        with observer.phase("publish"):
            metrics |= run.generator.publish(state.version)
        if due:
            metrics |= evaluate(run)
            saver.evaluated()
        if observe.samples_every and (is_due(number, observe.samples_every, learn.steps) or number == 1):
            observer.samples(number, batch.groups)
        saver.end_step()


def evaluate(run: Session) -> dict[str, float]:
    """Held-out scores of the current policy; remembers the best and the first."""
    state, data = run.state, run.data
    if not data.held_out:
        return {}
    with run.observer.phase("eval", memory="rollout"):
        result, groups = measure(run.config, data.held_out, run.generator, run.rewarder, data.tasks)
    accuracy = result.get("eval/pass@1", result.get("eval/score"))
    if accuracy is not None:
        state.note_accuracy(accuracy)
    run.observer.evaluated(state.step, result, groups, outcomes(run.config, run.rewarder.names, groups))
    return result


def finish(run: Session) -> dict[str, Any]:
    """Export the final model and sum the run up."""
    state = run.state
    run.observer.waiting("writing the final model")
    run.trainer.export(run.folder)
    measured = {"measure": "score"} if success_threshold(run.config, run.rewarder.names) is None else {}
    summary = {
        "run_dir": str(run.folder),
        "steps": state.step,
        "reward_first": state.reward_first,
        "reward_last": state.reward_last,
        "eval": {"before": state.accuracy_first, "after": state.accuracy_last, **measured},
        "tokens_per_s": state.completion_tokens / max(state.seconds, 1e-9),
        "peak_gib": run.observer.peak_gib,
        "seconds": round(state.seconds, 2),
    }
    run.observer.finish(summary)
    return summary
