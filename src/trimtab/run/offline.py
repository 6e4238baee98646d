"""Runs that learn from a given data set and not from what they sample: worked answers (supervised.py), pairs (preferences.py).

The same packed update, budgets, plan, guard, checkpoints and laws as reinforcement learning. What a `Stage` says is all that
differs: how rows are read, what a sample is, what is minimised and measured, and what is written out in the end.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from trimtab.base.errors import ConfigError, Problem, TrimtabError
from trimtab.base.signals import take_signals
from trimtab.config.algorithms import resolve
from trimtab.config.known import ResolvedLearn, ResolvedRun
from trimtab.config.learn import Learn
from trimtab.config.load import Offline, resolved_yaml
from trimtab.config.resolved import with_offline_plan
from trimtab.config.reward_model import PairLearn
from trimtab.config.sft import SftLearn
from trimtab.data.examples import Checking, ExampleSet, measure_examples, validate_examples
from trimtab.data.sources import eval_rows, train_rows
from trimtab.data.stream import Stream
from trimtab.data.view import View, view_example
from trimtab.model.adapters import refuse_unknown_targets
from trimtab.model.context import context_of
from trimtab.model.load import declared_stops, load_config, load_tokenizer, refuse_without_weights, stop_token_ids
from trimtab.model.policy import Policy, refuse_other_layers
from trimtab.observe.card import StartCard
from trimtab.observe.console import Console
from trimtab.observe.host import HostWatch
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.timeline import Timeline
from trimtab.plan.governor import Governor
from trimtab.plan.planner import Plan
from trimtab.plan.refusal import planned
from trimtab.plan.report import as_dict
from trimtab.plan.watch import PlanWatch
from trimtab.plan.work import Lengths, job_of
from trimtab.record.checkpoint import RunState, load_optimizer, prune, reading, save_checkpoint
from trimtab.record.folder import begin, claim, find_folder, refuse_existing
from trimtab.record.sinks import Sinks
from trimtab.rollout.no_rollout import NoRollout
from trimtab.run.build import (
    calibrated,
    card_facts,
    is_automatic,
    load_policy,
    own_modes,
    refuse_kernels,
    refuse_missing_wandb,
    returns_memory,
    spare_the_collector,
    take_up,
    use_planned_kernels,
)
from trimtab.run.endings import is_due, look_back, note_outcome, where_it_stands
from trimtab.run.inputs import Callback, Inputs, given_rows
from trimtab.run.keeping import Keeper, keeping
from trimtab.run.machine import load_within, machine_here, memory_limit, pick_device
from trimtab.run.recovery import open_guard
from trimtab.run.shapes import loaded_models
from trimtab.update.batch import Sample
from trimtab.update.guard import Guard
from trimtab.update.optimizer import learning_rate
from trimtab.update.updater import Updater, UpdateStats

CHARACTERS = 200_000_000
"""A training set up to this size is tokenised once at the start, a minute or two; of a larger one the longest texts are."""
FIRST = 1000
"""Rows of the training set that stand in for a held-out set."""


class Stage(Protocol):
    """What tells one kind of run from another."""

    unit: str
    """What a row is, in one word."""
    rehearses: bool
    """Two micro-batches can be measured at the start."""

    def refuse(self, config: Any) -> None:
        """Raise where nothing good can come of it, before any data is read."""
        ...

    def per_step(self, config: Any) -> int: ...

    def words(self, config: Any) -> str:
        """What is learned, for the start card."""
        ...

    def encoder(self, config: Any, tokenizer: Any, source_name: str) -> Checking[Any]: ...

    def samples(self, config: Any, items: Sequence[Any]) -> list[Sample]:
        """Samples of these items, each with its share of a step that consumes exactly these."""
        ...

    def updater(self, config: Any, policy: Policy, learn: ResolvedLearn, run: ResolvedRun) -> Updater: ...

    def metrics(self, stats: UpdateStats, samples: Sequence[Sample]) -> dict[str, float]: ...

    def evaluate(self, run: Run) -> dict[str, float]:
        """`eval/loss` and what else there is to know of held-out rows."""
        ...

    def files(self, updater: Updater) -> dict[str, dict[str, torch.Tensor]]:
        """More tensors for a checkpoint, by file."""
        ...

    def restore(self, checkpoint: Path, updater: Updater) -> None: ...

    def export(self, run: Run) -> dict[str, Any]:
        """Write RUN/final, and add to the summary."""
        ...


@dataclass
class Run:
    """A run with everything in place."""

    stage: Stage
    config: Offline
    learn: ResolvedLearn
    """The same settings as the updater knows them."""
    folder: Path
    state: RunState
    resumed: bool
    tokenizer: Any
    policy: Policy
    updater: Updater
    stream: Stream[Any]
    held_out: list[Sample]
    ready: Checked
    console: Console
    timeline: Timeline
    sinks: Sinks
    meter: MemoryMeter
    guard: Guard
    host: HostWatch
    watch: PlanWatch
    governor: Governor
    callbacks: Sequence[Callback]

    def first(self) -> list[Sample]:
        """First samples of the training set, to measure on where there are no held-out rows; none that is too long to be used."""
        rows = self.ready.rows[:FIRST]
        items = self.stage.encoder(self.config, self.tokenizer, "data.train").encode(range(len(rows)), rows)
        return self.stage.samples(self.config, [item for item in items if len(item.tokens) <= self.ready.limit])


@dataclass(frozen=True)
class Checked:
    """A run that nothing short of its weights can refuse."""

    config: Offline
    device: torch.device
    folder: Path
    tokenizer: Any
    limit: int
    """Tokens of the longest example that is used."""
    rows: list[dict[str, Any]]
    train: ExampleSet
    held_out: list[Any]
    note: str

    @property
    def lengths(self) -> Lengths:
        """What a plan has to know of the data."""
        longest = max(self.train.longest, *(getattr(e, "row_tokens", len(e.tokens)) for e in self.held_out), 1)
        return Lengths(longest, longest, len(self.held_out))

    def view(self, stage: Stage, stop_token_ids: list[int]) -> View:
        encoder = stage.encoder(self.config, self.tokenizer, "data.train")
        return view_example(stage.unit, encoder, self.rows[0], self.tokenizer, stop_token_ids)


def check(stage: Stage, config: Offline, inputs: Inputs, *, resume: bool) -> Checked:
    """Try everything that needs no weights, cheapest first. Writes nothing."""
    device = pick_device(config.run)
    folder = find_folder(config.observe.dir, inputs.name, resume)
    refuse_existing(folder, resume)
    refuse_missing_wandb(config.observe)
    refuse_kernels(config.run, config.model, device)
    stage.refuse(config)
    limit = _limit(config)
    if not resume:  # or a checkpoint may have them
        refuse_without_weights(config.model)
    refuse_other_layers(config.model)
    if config.model.lora is not None:
        refuse_unknown_targets(config.model.lora, load_config(config.model), config.model.trust_remote_code)
    tokenizer = load_tokenizer(config.model)
    learn, data = config.learn, config.data
    given = given_rows(inputs.train_rows, data.train, "data.train")
    rows = train_rows(data, seed=learn.seed) if given is None else [dict(row) for row in given]
    rows = rows[: data.limit]
    encoder = stage.encoder(config, tokenizer, "data.train")
    validate_examples(rows, encoder)
    budgets = {key: getattr(config.run, key) for key in ("token_budget", "score_token_budget")}
    pinned = {key: value for key, value in budgets.items() if value != "auto"}
    train = measure_examples(rows, encoder, limit, 2**62 if pinned else CHARACTERS)
    held_out, note = _read_held_out(stage, config, inputs, tokenizer, limit)
    longest = max(train.longest, *(getattr(item, "row_tokens", len(item.tokens)) for item in held_out), 1)
    for key, value in pinned.items():
        if value < longest:
            what = f"{value} tokens cannot hold the longest {stage.unit}, {longest}"
            raise ConfigError([Problem(f"run.{key}", what, f"At least {longest}, or auto.")])
    steps = learn.steps or max(1, math.ceil(learn.epochs * train.fitting / stage.per_step(config)))
    if learn.schedule.warmup_steps >= steps:
        what = f"is {learn.schedule.warmup_steps} of {steps} steps, so the rate would never be reached"
        raise ConfigError([Problem("learn.schedule.warmup_steps", what, "Write fewer, or train longer.")])
    config = config.with_values({"learn.steps": steps, "learn.epochs": 1.0})
    return Checked(config, device, folder, tokenizer, limit, rows, train, held_out, note)


def dry_run(stage: Stage, config: Offline, inputs: Inputs, file: IO[str], *, resume: bool = False) -> dict[str, Any]:
    """Find what would stop the run before its first step, without loading weights or making a run folder."""
    ready = check(stage, config, inputs, resume=resume)
    print(resolved_yaml(ready.config), file=file)
    for note in (ready.train.note, ready.note):
        if note:
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
    example = ready.view(stage, declared_stops(config.model, ready.tokenizer))
    example.print(file)
    return result | example.facts()


@returns_memory
def run_offline(
    stage: Stage, config: Offline, inputs: Inputs, *, resume: bool = False, console_file: IO[str] | None = None
) -> dict[str, Any]:
    """Run a validated config; returns the summary."""
    with take_signals(), own_modes(), ExitStack() as stack:
        run = open_run(stage, config, inputs, stack, resume=resume, console_file=console_file)
        try:
            return train(run)
        except (KeyboardInterrupt, TrimtabError):
            run.console.close()
            run.console.warn(where_it_stands(run.folder, run.state, run.learn.steps))
            raise


def open_run(
    stage: Stage,
    config: Offline,
    inputs: Inputs,
    stack: ExitStack,
    *,
    resume: bool = False,
    console_file: IO[str] | None = None,
) -> Run:
    """Build a run. Whatever it opens is closed by `stack`, also when a later part fails."""
    console = stack.enter_context(Console(1, file=console_file))
    console.waiting("reading the tokenizer and the data, counting tokens")
    ready = check(stage, config, inputs, resume=resume)
    config, folder = ready.config, ready.folder
    stack.enter_context(memory_limit(config.run, ready.device))
    assert config.learn.steps is not None
    console.history.total_steps = config.learn.steps
    stack.enter_context(claim(folder, resume))
    checkpoint, state, _ = take_up(config, ready.device, folder, ready.rows, resume, console)
    console.waiting(f"loading {checkpoint or config.model.path}")
    source = (config.model, config.learn.seed, ready.device, config.run.kernels, checkpoint)
    policy = load_within(config.run, ready.device, load_policy, *source)
    learn, asked = as_learn(config.learn, stage.per_step(config)), config.run
    plan = planned(asked, job_of(config, loaded_models(config, policy), ready.lengths), machine_here(ready.device))
    torch.set_num_threads(plan.run.threads)
    use_planned_kernels(plan, policy)
    updater, engine = stage.updater(config, policy, learn, plan.run), NoRollout()
    automatic = is_automatic(asked, plan)
    plan = calibrated(plan, asked, updater, engine) if stage.rehearses else plan
    config = with_offline_plan(config, plan.run)
    if checkpoint is not None:
        with reading(checkpoint):
            stage.restore(checkpoint, updater)
        load_optimizer(checkpoint, updater.optimizer)
        prune(folder, config.observe.keep_checkpoints, state.best_step)  # a kill may have come before it
    if checkpoint is None or state.step < (config.learn.steps or 0):  # or nothing is learned with these settings
        begin(folder, config, as_dict(plan))
    # A fast tokenizer is not safe to share between threads, so the stream has its own.
    encoder = stage.encoder(config, copy.deepcopy(ready.tokenizer), "data.train")
    stream = Stream(
        ready.rows, encoder, most_tokens=ready.limit, seed=learn.seed, shuffle=config.data.shuffle, position=state.data_position
    )  # fmt: skip
    stack.callback(stream.close)
    sinks = Sinks(folder, config.observe, state.step if checkpoint else None)
    stack.callback(sinks.close)
    example = ready.view(stage, stop_token_ids(policy.model, ready.tokenizer))
    card = _card(stage, config, folder, policy, ready, plan, state.step if checkpoint else None)
    console.card(replace(card, prompt=example.lines()), inputs.verbose)
    for tell, note in ((console.warn, example.warning), (console.note, ready.train.note), (console.note, ready.note)):
        if note:
            tell(note)
    spare_the_collector(stack)
    timeline = Timeline(folder, on_phase=console.working)
    stack.callback(timeline.close)
    meter = MemoryMeter(ready.device)
    updater.metered = lambda: meter.phase("optimizer")
    return Run(
        stage=stage,
        config=config,
        learn=learn,
        folder=folder,
        state=state,
        resumed=checkpoint is not None,
        tokenizer=ready.tokenizer,
        policy=policy,
        updater=updater,
        stream=stream,
        held_out=stage.samples(config, ready.held_out),
        ready=ready,
        console=console,
        timeline=timeline,
        sinks=sinks,
        meter=meter,
        guard=_guard(updater, engine, state, console, timeline, plan),
        host=HostWatch(console.warn),
        watch=PlanWatch(plan),
        governor=Governor(plan, automatic, asked.checkpoint_activations == "auto"),
        callbacks=inputs.callbacks,
    )


def train(run: Run) -> dict[str, Any]:
    """Train from the run's state to the last step; returns the summary."""
    with keeping(run, run.learn.steps, [run.updater.optimizer], partial(_save, run)) as keeper:
        _train(run, keeper)
    return finish(run)


def _train(run: Run, keeper: Keeper) -> None:
    learn, observe, state = run.learn, run.config.observe, run.state
    if not run.resumed:
        first = evaluate(run)
        run.timeline.end_step(0)
        if first:
            run.sinks.write(0, first)
    elif state.eval_due:
        keeper.evaluate_again(lambda: evaluate(run))
    while state.step < learn.steps:
        recovered = state.oom_recoveries
        metrics = step(run)
        due = bool(run.held_out) and is_due(state.step + 1, observe.eval_every, learn.steps)
        keeper.finish(metrics, metrics["run/row_tokens"], recovered, run.stream.position, due)
        if due:
            metrics |= evaluate(run)
            keeper.evaluated()
        keeper.end_step()


def step(run: Run) -> dict[str, float]:
    """One optimizer step on what comes next."""
    samples = run.stage.samples(run.config, run.stream.take(run.stage.per_step(run.config)))
    with run.timeline.phase("update"), run.meter.phase("update"):
        stats = run.guard.step(samples, learning_rate(run.learn, run.state.step), 0.0)
        run.watch.saw(
            stats.sizes,
            run.updater.checkpoint_activations,
            run.updater.logprob_chunk,
            run.policy.shelf is not None,
        )
    loss = float(stats.sums["loss"])
    note_outcome(run.state, stats, run.console, "for broken rows in the data")
    run.state.note_loss(loss)
    run.state.completion_tokens += stats.row_tokens
    return {
        **run.stage.metrics(stats, samples),
        "run/row_tokens": float(stats.row_tokens),
        "policy/grad_norm": stats.grad_norm,
        "policy/lr": learning_rate(run.learn, run.state.step),
        "run/samples": float(len(samples)),
        "run/token_budget": float(stats.token_budget),
        "run/max_microbatch_tokens": float(stats.largest),
        "run/microbatches": float(stats.microbatches),
        "run/packing_fill": stats.row_tokens / (stats.microbatches * stats.token_budget),
        "run/skipped_updates": float(not stats.applied),
        **({} if stats.behind is None else {"run/device_behind": stats.behind}),
    }


def evaluate(run: Run) -> dict[str, float]:
    """How good it is on held-out rows; remembers the best and the first loss."""
    if not run.held_out:
        return {}
    with run.timeline.phase("eval"):
        result = run.stage.evaluate(run)
    run.state.note_eval_loss(result["eval/loss"])
    run.console.eval(run.state.step, {name.removeprefix("eval/"): value for name, value in result.items()})
    return result


def finish(run: Run) -> dict[str, Any]:
    """Export the final model and sum the run up."""
    state = run.state
    run.console.waiting("writing the final model")
    more = run.stage.export(run)
    summary = {
        "run_dir": str(run.folder),
        "steps": state.step,
        "loss_first": state.loss_first,
        "loss_last": state.loss_last,
        "eval": {"loss before": state.eval_loss_first, "loss after": state.eval_loss_last},
        "tokens_per_s": state.completion_tokens / max(state.seconds, 1e-9),
        "peak_gib": run.meter.peak_gib,
        "seconds": round(state.seconds, 2),
        **more,
    }
    run.console.finish(summary)
    look_back(run.folder, run.console)
    return summary


def as_learn(learn: SftLearn | PairLearn, per_step: int) -> ResolvedLearn:
    """The settings as the updater and the optimizer know them: the plain gradient of log p."""
    assert learn.steps is not None
    return resolve(
        Learn(
            steps=learn.steps,
            seed=learn.seed,
            prompts_per_step=per_step,
            samples_per_prompt=1,
            lr=learn.lr,
            schedule=learn.schedule,
            optimizer=learn.optimizer,
            max_grad_norm=learn.max_grad_norm,
            loss="on_policy",
            aggregate="token_mean",
            advantage="batch_mean",
        )
    )


def _limit(config: Offline) -> int:
    """Tokens of the longest example that the model can read."""
    context = context_of(load_config(config.model).get_text_config())
    asked = config.learn.max_tokens
    if asked is not None and asked > context:
        what = f"{asked} tokens exceed the model's context of {context}"
        raise ConfigError([Problem("learn.max_tokens", what, f"At most {context}.")])
    return asked or context


def _read_held_out(stage: Stage, config: Offline, inputs: Inputs, tokenizer: Any, limit: int) -> tuple[list[Any], str]:
    given = given_rows(inputs.eval_rows, config.data.eval, "data.eval")
    if given is None and config.data.eval is None:
        return [], ""
    rows = eval_rows(config.data, seed=config.learn.seed) if given is None else [dict(row) for row in given]
    encoder = stage.encoder(config, tokenizer, "data.eval")
    validate_examples(rows, encoder)
    measured = measure_examples(rows, encoder, limit, 2**62)
    return [e for e in encoder.encode(range(len(rows)), rows) if len(e.tokens) <= limit], measured.note


def _card(
    stage: Stage, config: Offline, folder: Path, policy: Policy, ready: Checked, plan: Plan, done: int | None
) -> StartCard:
    learn = config.learn
    return StartCard(
        **card_facts(config, policy, plan),
        run_dir=folder,
        algorithm=stage.words(config),
        batch=[
            ("batch", f"{stage.per_step(config)} {stage.unit}s a step, {learn.steps} steps"),
            ("tokens", f"up to {ready.train.longest:,} a{'n' * (stage.unit[0] in 'aeiou')} {stage.unit}"),
        ],
        data_rows=len(ready.rows),
        eval_rows=len(ready.held_out) or None,
        resumed_from=done,
    )


def _guard(
    updater: Updater, engine: NoRollout, state: RunState, console: Console, timeline: Timeline, plan: Plan
) -> Guard:
    guard = open_guard(updater, engine, state, console, timeline, plan.job.longest_trained)
    guard.shorter = "lower learn.max_tokens"
    return guard


def _save(run: Run, state: RunState) -> None:
    keep, others = run.config.observe.keep_checkpoints, run.stage.files(run.updater)
    save_checkpoint(run.folder, state, run.policy.model, run.tokenizer, run.updater.optimizer, keep, others)
