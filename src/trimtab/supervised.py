"""Learning from worked answers: the same packed update, budgets, plan, guard, checkpoints and laws as reinforcement learning.

The loss is the mean of -log p over the tokens that are learned, in nats; what a token weighs is counted over the step before
anything is split, so no key of `run` changes it. In the updater's terms an example is a sample with an advantage of one: its
prompt ends where the first answer begins, and what is not learned after that (other turns) weighs nothing.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from trimtab.build import (
    calibrated,
    compare,
    is_automatic,
    known,
    load_policy,
    make_updater,
    refuse_missing_wandb,
    spare_the_collector,
)
from trimtab.checkpoint import RunState, load_optimizer, load_state, newest_checkpoint, save_checkpoint
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.config.load import resolved_yaml
from trimtab.config.sft import SftConfig, SftLearn
from trimtab.data.examples import Example, ExampleEncoder, ExampleSet, measure_examples, validate_examples
from trimtab.data.sources import eval_rows, train_rows
from trimtab.data.stream import Stream
from trimtab.endings import export, note_outcome, where_it_stands
from trimtab.errors import ConfigError, Problem, TrimtabError
from trimtab.folder import begin, claim, find_folder, refuse_existing
from trimtab.model.adapters import refuse_unknown_targets
from trimtab.model.load import load_config, load_tokenizer
from trimtab.model.policy import Policy
from trimtab.observe.card import StartCard
from trimtab.observe.console import Console
from trimtab.observe.host import HostWatch
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.sinks import Sinks
from trimtab.observe.timeline import Timeline
from trimtab.plan.governor import Governor
from trimtab.plan.here import machine_here, pick_device
from trimtab.plan.job import Job
from trimtab.plan.planner import Plan
from trimtab.plan.refusal import planned
from trimtab.plan.report import as_dict
from trimtab.plan.shape import shape_of_model
from trimtab.plan.watch import PlanWatch
from trimtab.recovery import open_guard
from trimtab.rollout.none import NoRollout
from trimtab.update.batch import Sample
from trimtab.update.guard import Guard
from trimtab.update.optimizer import learning_rate
from trimtab.update.updater import Updater
from trimtab.work import MEASURED_CHARACTERS, Callback, Inputs, given_rows

GIB = 2**30


@dataclass
class SftRun:
    """A supervised run with everything in place."""

    config: SftConfig
    learn: Learn
    """The same settings as the updater knows them."""
    folder: Path
    state: RunState
    resumed: bool
    tokenizer: Any
    policy: Policy
    updater: Updater
    stream: Stream[Example]
    held_out: list[Sample]
    console: Console
    timeline: Timeline
    sinks: Sinks
    meter: MemoryMeter
    guard: Guard
    host: HostWatch
    watch: PlanWatch
    governor: Governor
    callbacks: Sequence[Callback]


@dataclass(frozen=True)
class Checked:
    """A run that nothing short of its weights can refuse."""

    config: SftConfig
    device: torch.device
    folder: Path
    tokenizer: Any
    limit: int
    """Tokens of the longest example that is used."""
    rows: list[dict[str, Any]]
    train: ExampleSet
    held_out: list[Example]
    note: str


def check(config: SftConfig, inputs: Inputs, *, resume: bool) -> Checked:
    """Try everything that needs no weights, cheapest first. Writes nothing."""
    device = pick_device(config.run)
    folder = find_folder(config.observe.dir, inputs.name, resume)
    refuse_existing(folder, resume)
    refuse_missing_wandb(config.observe)
    limit = _limit(config)
    if config.model.lora is not None:
        refuse_unknown_targets(config.model.lora, load_config(config.model), config.model.trust_remote_code)
    tokenizer = load_tokenizer(config.model)
    learn, data = config.learn, config.data
    given = given_rows(inputs.train_rows, data.train, "data.train")
    rows = train_rows(data, seed=learn.seed) if given is None else [dict(row) for row in given]
    rows = rows[: data.limit]
    encoder = ExampleEncoder(data, learn.loss_on, tokenizer, "data.train")
    validate_examples(rows, encoder)
    pinned = config.run.token_budget
    train = measure_examples(rows, encoder, limit, MEASURED_CHARACTERS)
    if pinned != "auto" and pinned < train.longest:
        what = f"{pinned} tokens cannot hold the longest example, {train.longest}"
        raise ConfigError([Problem("run.token_budget", what, f"At least {train.longest}, or auto.")])
    held_out, note = _read_held_out(config, inputs, tokenizer, limit)
    steps = learn.steps or max(1, math.ceil(learn.epochs * len(rows) / learn.sequences_per_step))
    config = config.model_copy(update={"learn": learn.model_copy(update={"steps": steps, "epochs": 1.0})})
    return Checked(config, device, folder, tokenizer, limit, rows, train, held_out, note)


def dry_run(config: SftConfig, inputs: Inputs, file: IO[str], *, resume: bool = False) -> dict[str, Any]:
    """Find what would stop the run before its first step, without loading weights or making a run folder."""
    ready = check(config, inputs, resume=resume)
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
    return result


def run_sft(
    config: SftConfig, inputs: Inputs, *, resume: bool = False, console_file: IO[str] | None = None
) -> dict[str, Any]:
    """Run a validated config; returns the summary."""
    with ExitStack() as stack:
        run = open_sft(config, inputs, stack, resume=resume, console_file=console_file)
        try:
            return train(run)
        except (KeyboardInterrupt, TrimtabError):
            run.console.close()
            run.console.warn(where_it_stands(run.folder, run.state, run.learn.steps))
            raise


def open_sft(
    config: SftConfig, inputs: Inputs, stack: ExitStack, *, resume: bool = False, console_file: IO[str] | None = None
) -> SftRun:
    """Build a run. Whatever it opens is closed by `stack`, also when a later part fails."""
    console = stack.enter_context(Console(1, file=console_file))
    ready = check(config, inputs, resume=resume)
    config, folder = ready.config, ready.folder
    assert config.learn.steps is not None
    console.history.total_steps = config.learn.steps
    stack.enter_context(claim(folder, resume))
    checkpoint = newest_checkpoint(folder) if resume else None
    state = RunState()
    if checkpoint is not None:
        state = load_state(checkpoint)
        compare(config, ready.device, folder, checkpoint, console)
    policy = load_policy(config.model, config.learn.seed, ready.device, checkpoint)
    learn, asked = as_learn(config.learn), config.run
    plan = planned(asked, _job(config, policy, ready), machine_here(ready.device))
    torch.set_num_threads(known(plan.run.threads))
    updater, engine = make_updater(policy, learn, plan.run), NoRollout()
    automatic = is_automatic(asked, plan)
    plan = calibrated(plan, asked, updater, engine)
    config = config.model_copy(update={"run": plan.run})
    if checkpoint is not None:
        load_optimizer(checkpoint, updater.optimizer)
    begin(folder, config, as_dict(plan))
    # A fast tokenizer is not safe to share between threads, so the stream has its own.
    encoder = ExampleEncoder(config.data, config.learn.loss_on, copy.deepcopy(ready.tokenizer), "data.train")
    stream = Stream(
        ready.rows, encoder, most_tokens=ready.limit, seed=learn.seed, shuffle=config.data.shuffle, position=state.data_position
    )  # fmt: skip
    stack.callback(stream.close)
    sinks = Sinks(folder, config.observe, state.step if checkpoint else None)
    stack.callback(sinks.close)
    console.card(_card(config, folder, policy, ready, plan, state.step if checkpoint else None))
    for note in (ready.train.note, ready.note):
        if note:
            console.note(note)
    timeline = Timeline(folder, on_phase=console.working)
    stack.callback(timeline.close)
    spare_the_collector(stack)
    return SftRun(
        config, learn, folder, state, checkpoint is not None, ready.tokenizer, policy, updater, stream,
        to_samples(ready.held_out, config.learn.aggregate), console, timeline, sinks, MemoryMeter(ready.device),
        open_guard(updater, engine, state, console, timeline, plan.job.longest_trained), HostWatch(console.warn),
        PlanWatch(plan), Governor(plan, automatic=automatic), inputs.callbacks,
    )  # fmt: skip


def train(run: SftRun) -> dict[str, Any]:
    """Train from the run's state to the last step; returns the summary."""
    started = time.monotonic() - run.state.seconds
    learn, observe, state = run.learn, run.config.observe, run.state
    if not run.resumed:
        first = evaluate(run)
        run.timeline.end_step(0)
        if first:
            run.sinks.write(0, first)
    while state.step < learn.steps:
        recovered = state.oom_recoveries
        metrics = step(run)
        state.step += 1
        state.data_position = run.stream.position
        last = state.step == learn.steps
        if last or (observe.eval_every and state.step % observe.eval_every == 0):
            metrics |= evaluate(run)
        state.seconds = time.monotonic() - started
        metrics |= run.guard.end_step() | run.meter.end_step() | run.host.end_step(learn.steps - state.step)
        metrics |= run.watch.end_step(metrics)
        if state.oom_recoveries == recovered:
            budget = run.governor.next_budget(metrics, run.updater.token_budget, run.guard.ceiling.get("token_budget"))
            run.updater.token_budget = budget or run.updater.token_budget
        metrics |= run.timeline.end_step(state.step) | {"run/oom_recoveries": float(state.oom_recoveries)}
        metrics["throughput/tokens_per_s"] = metrics["sft/row_tokens"] / metrics["time/total"]
        run.sinks.write(state.step, metrics)
        run.console.step(state.step, metrics)
        best = state.step == state.best_step
        if last or best or (observe.checkpoint_every and state.step % observe.checkpoint_every == 0):
            with run.timeline.phase("checkpoint"):
                run.guard.run("checkpoint", lambda: _save(run))
        for callback in run.callbacks:
            callback(state.step, dict(metrics))
    return finish(run)


def step(run: SftRun) -> dict[str, float]:
    """One optimizer step on the next examples."""
    examples = run.stream.take(run.config.learn.sequences_per_step)
    samples = to_samples(examples, run.config.learn.aggregate)
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
    learned = sum(int(sample.weights.count_nonzero()) for sample in samples)
    run.state.completion_tokens += stats.row_tokens
    return {
        "sft/loss": loss,
        "sft/tokens": float(learned),
        "sft/row_tokens": float(stats.row_tokens),
        "policy/grad_norm": stats.grad_norm,
        "policy/lr": learning_rate(run.learn, run.state.step),
        "run/samples": float(len(samples)),
        "run/token_budget": float(stats.token_budget),
        "run/max_microbatch_tokens": float(stats.largest),
        "run/microbatches": float(stats.microbatches),
        "run/packing_fill": stats.row_tokens / (stats.microbatches * stats.token_budget),
        "run/skipped_updates": float(not stats.applied),
    }


def evaluate(run: SftRun) -> dict[str, float]:
    """Loss on held-out examples, by the same weights; remembers the best and the first."""
    if not run.held_out:
        return {}
    with run.timeline.phase("eval"):
        run.guard.score(run.held_out, run.policy, "old_logprobs")
    loss = -sum(float((s.weights * s.old_logprobs).sum()) for s in run.held_out if s.old_logprobs is not None)
    for sample in run.held_out:
        sample.old_logprobs = None
    run.state.note_eval_loss(loss)
    result = {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    run.console.eval(run.state.step, {"loss": loss})
    return result


def finish(run: SftRun) -> dict[str, Any]:
    """Export the final model and sum the run up."""
    state = run.state
    export(run.folder, run.policy, run.tokenizer, run.guard)
    summary = {
        "run_dir": str(run.folder),
        "steps": state.step,
        "loss_first": state.loss_first,
        "loss_last": state.loss_last,
        "eval": {"loss before": state.eval_loss_first, "loss after": state.eval_loss_last},
        "tokens_per_s": state.completion_tokens / max(state.seconds, 1e-9),
        "peak_gib": run.meter.peak_gib,
        "seconds": round(state.seconds, 2),
    }
    run.console.finish(summary)
    return summary


def to_samples(examples: list[Example], aggregate: str) -> list[Sample]:
    """Examples with each learned token's share of a step that consumes exactly these."""
    total = sum(sum(example.learned) for example in examples)
    samples = []
    for example in examples:
        start = example.start
        marks = torch.tensor(example.learned[start:], dtype=torch.float32)
        share = 1 / total if aggregate == "token_mean" else 1 / (len(examples) * int(marks.sum()))
        count = len(marks)
        samples.append(
            Sample(
                example.tokens[:start],
                torch.tensor(example.tokens[start:]),
                advantages=torch.ones(count),
                weights=share * marks,
                engine_logprobs=torch.zeros(count),
            )
        )
    return samples


def as_learn(learn: SftLearn) -> Learn:
    """The settings as the updater and the optimizer know them: the plain gradient of log p."""
    assert learn.steps is not None
    return resolve(
        Learn(
            steps=learn.steps,
            seed=learn.seed,
            prompts_per_step=learn.sequences_per_step,
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


def _limit(config: SftConfig) -> int:
    """Tokens of the longest example that the model can read."""
    architecture = load_config(config.model).get_text_config()
    context = int(getattr(architecture, "max_position_embeddings", None) or 2**31)
    asked = config.learn.max_tokens
    if asked is not None and asked > context:
        what = f"{asked} tokens exceed the model's context of {context}"
        raise ConfigError([Problem("learn.max_tokens", what, f"At most {context}.")])
    return asked or context


def _read_held_out(config: SftConfig, inputs: Inputs, tokenizer: Any, limit: int) -> tuple[list[Example], str]:
    given = given_rows(inputs.eval_rows, config.data.eval, "data.eval")
    if given is None and config.data.eval is None:
        return [], ""
    rows = eval_rows(config.data, seed=config.learn.seed) if given is None else [dict(row) for row in given]
    encoder = ExampleEncoder(config.data, config.learn.loss_on, tokenizer, "data.eval")
    validate_examples(rows, encoder)
    measured = measure_examples(rows, encoder, limit, 2**62)
    return [e for e in encoder.encode(range(len(rows)), rows) if len(e.tokens) <= limit], measured.note


def _job(config: SftConfig, policy: Policy, ready: Checked) -> Job:
    """Every token of the longest example may be learned: memory is planned for that."""
    lora = config.model.lora
    return Job(
        shape=shape_of_model(policy.model),
        itemsize=policy.dtype.itemsize,
        prompts=config.learn.sequences_per_step,
        samples=1,
        longest_prompt=1,
        typical_prompt=1,
        completion=max(2, ready.train.longest, *(len(e.tokens) for e in ready.held_out)) - 1,
        rank=lora.r if lora else 0,
        adapters=sum(p.numel() for p in policy.parameters()) if lora else 0,
        old_logprobs=bool(ready.held_out),
        generates=False,
        fused=policy.fused,
        tiled_head=policy.tiled_head,
    )


def _card(config: SftConfig, folder: Path, policy: Policy, ready: Checked, plan: Plan, done: int | None) -> StartCard:
    learn = config.learn
    device, total = "CPU", None
    if policy.device.type == "cuda":
        properties = torch.cuda.get_device_properties(policy.device)
        device, total = properties.name, properties.total_memory / GIB
    return StartCard(
        run_dir=folder,
        model=config.model.path,
        parameters=policy.parameter_count(),
        trainable_parameters=sum(p.numel() for p in policy.parameters()),
        dtype=str(policy.dtype).removeprefix("torch."),
        device=device,
        algorithm=f"supervised, loss on {learn.loss_on}, {learn.aggregate}",
        batch=[
            ("batch", f"{learn.sequences_per_step} examples a step, {learn.steps} steps"),
            ("tokens", f"up to {ready.train.longest:,} an example"),
        ],
        data_rows=len(ready.rows),
        eval_rows=len(ready.held_out) or None,
        device_total_gib=total,
        host_total_gib=psutil.virtual_memory().total / GIB,
        update=policy.path,
        choices=[(c.key, c.value, c.why) for c in plan.choices],
        device_peak_gib=plan.ledger.fullest.device_bytes / GIB if policy.device.type == "cuda" else None,
        host_peak_gib=plan.ledger.fullest_host.host_bytes / GIB,
        resumed_from=done,
    )


def _save(run: SftRun) -> None:
    keep = run.config.observe.keep_checkpoints
    save_checkpoint(run.folder, run.state, run.policy.model, run.tokenizer, run.updater.optimizer, keep)
