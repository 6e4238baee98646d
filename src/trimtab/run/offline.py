"""Runs that learn from a given data set and not from what they sample: worked answers (sft.py), pairs (reward_model.py).

The same Trainer, packed update, budgets, plan, checkpoints and laws as reinforcement learning, with another objective.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import IO, Any

from trimtab.base.signals import take_signals
from trimtab.config.load import Offline, resolved_yaml
from trimtab.model.load import declared_stops
from trimtab.run.build import own_modes, returns_memory
from trimtab.run.finish_step import is_due, note_outcome
from trimtab.run.inputs import Inputs
from trimtab.run.offline_data import Examples, OfflineStage
from trimtab.run.open_run import open_run
from trimtab.run.plan_ahead import plan_lines
from trimtab.run.restarts import telling_how_it_ends, with_restarts
from trimtab.run.roles import TrainingRun
from trimtab.run.save_on_stop import StepSaver, save_on_stop
from trimtab.update.schedule import learning_rate

OfflineRun = TrainingRun[Offline, Examples]


def dry_run(
    stage: OfflineStage, config: Offline, inputs: Inputs, file: IO[str], *, resume: bool = False
) -> dict[str, Any]:
    """Find what would stop the run before its first step, without loading weights or making a run folder."""
    with ExitStack() as stack:
        ready = stage.check(config, inputs, stack, resume=resume)
        facts, lines = plan_lines(ready)
    print(resolved_yaml(ready.config), file=file)
    for note in filter(None, ready.notes):
        print(note, file=file)
    result = {
        "ok": True,
        "run_dir": str(ready.folder),
        "train_rows": len(ready.rows),
        "eval_rows": len(ready.held_out),
        "longest_tokens": ready.train.longest,
        "steps": ready.config.learn.steps,
    }
    print("\n".join(f"{key}: {value}" for key, value in result.items()), file=file)
    print("\n".join(lines), file=file)
    example = stage.view(ready, declared_stops(config.model, ready.tokenizer))
    example.print(file)
    return result | facts | example.facts()


@returns_memory
def run_offline(
    stage: OfflineStage, config: Offline, inputs: Inputs, *, resume: bool = False, console_file: IO[str] | None = None
) -> dict[str, Any]:
    """Run a validated config; returns the summary."""

    def attempt(config: Offline, inputs: Inputs, resume: bool) -> dict[str, Any]:
        with ExitStack() as stack:
            opened = open_run(stage, config, inputs, stack, resume=resume, console_file=console_file)
            ready, config = opened.ready, opened.config
            data = Examples(stage, ready, opened.stream, stage.samples(config, ready.held_out))
            run = OfflineRun(config, ready.folder, opened.state, data, opened.trainer, opened.observer)
            assert config.learn.steps is not None, "known once the data is counted"
            with telling_how_it_ends(run, config.learn.steps, inputs):
                return train(run, config.learn.steps)

    with take_signals(), own_modes():
        return with_restarts(attempt, config, inputs, resume)


def train(run: OfflineRun, steps: int) -> dict[str, Any]:
    """Train from the run's state to the last step; returns the summary."""
    with save_on_stop(run, steps) as saver:
        _train(run, saver, steps)
    return finish(run)


def _train(run: OfflineRun, saver: StepSaver, steps: int) -> None:
    observe, state = run.config.observe, run.state
    if not state.step:
        first = evaluate(run)
        run.observer.end_phases(0)
        if first:
            run.observer.write(0, first)
    elif state.eval_due:
        saver.evaluate_again(lambda: evaluate(run))
    while state.step < steps:
        recovered = state.oom_recoveries
        metrics = step(run)
        due = bool(run.data.held_out) and is_due(state.step + 1, observe.eval_every, steps)
        saver.finish(metrics, metrics["run/row_tokens"], recovered, run.data.stream.position, due)
        if due:
            metrics |= evaluate(run)
            saver.evaluated()
        saver.end_step()


def step(run: OfflineRun) -> dict[str, float]:
    """One optimizer step on what comes next."""
    stage, learn, state = run.data.stage, run.config.learn, run.state
    samples = stage.samples(run.config, run.data.stream.take(stage.per_step(run.config)))
    rate = learning_rate(learn, state.step)
    with run.observer.phase("update", memory="update"):
        stats = run.trainer.accumulate(samples).complete(run.trainer.apply(rate))
        run.observer.saw(stats, run.trainer.settings)
    loss = float(stats.sums["loss"])
    note_outcome(state, stats, run.observer, "for broken rows in the data")
    state.note_loss(loss)
    state.completion_tokens += stats.row_tokens
    return {
        **stage.metrics(stats, samples),
        "run/row_tokens": float(stats.row_tokens),
        "policy/grad_norm": stats.grad_norm,
        "policy/lr": rate,
        "run/samples": float(len(samples)),
        "run/token_budget": float(stats.token_budget),
        "run/max_microbatch_tokens": float(stats.largest),
        "run/microbatches": float(stats.microbatches),
        "run/packing_fill": stats.row_tokens / (stats.microbatches * stats.token_budget * stats.row_ranks),
        "run/skipped_updates": float(not stats.applied),
        **({} if stats.behind is None else {"run/device_behind": stats.behind}),
        **({} if stats.imbalance is None else {"run/rank_imbalance": stats.imbalance}),
    }


def evaluate(run: OfflineRun) -> dict[str, float]:
    """How good it is on held-out rows; remembers the best and the first loss."""
    data = run.data
    if not data.held_out:
        return {}
    with run.observer.phase("eval"):
        result = data.stage.evaluate(run.config, run.trainer, data.held_out)
    run.state.note_eval_loss(result["eval/loss"])
    run.observer.evaluated(run.state.step, {name.removeprefix("eval/"): value for name, value in result.items()})
    return result


def finish(run: OfflineRun) -> dict[str, Any]:
    """Export the final model and sum the run up."""
    state = run.state
    run.observer.waiting("writing the final model")
    more = run.data.stage.export(run.config, run.trainer, run.folder, run.data)
    summary = {
        "run_dir": str(run.folder),
        "steps": state.step,
        "loss_first": state.loss_first,
        "loss_last": state.loss_last,
        "eval": {"loss before": state.eval_loss_first, "loss after": state.eval_loss_last},
        "tokens_per_s": state.completion_tokens / max(state.seconds, 1e-9),
        "peak_gib": run.observer.peak_gib,
        "seconds": round(state.seconds, 2),
        **more,
    }
    run.observer.finish(summary)
    return summary
