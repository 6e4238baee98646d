"""Puts a run of any stage together, cheapest checks first: data and rewards are read and tried before any weight is loaded, and
the run folder is written only when nothing is left that could refuse the run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from trimtab.config.known import ResolvedRun
from trimtab.config.load import AnyConfig
from trimtab.config.resolved import ResolvedConfig, with_offline_plan, with_plan
from trimtab.data.stream import Stream
from trimtab.model.kernel_choice import use_kernels
from trimtab.model.load import load_model, stop_token_ids
from trimtab.model.memory import free
from trimtab.model.policy import AnyPolicy, FromHost, Policy, WithoutAdapters
from trimtab.observe.card import StartCard
from trimtab.observe.console import Console
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.observer import LocalObserver
from trimtab.observe.recoveries import Recoveries
from trimtab.observe.timeline import Timeline
from trimtab.plan.governor import Governor
from trimtab.plan.ledger import CHECKPOINT_COPY
from trimtab.plan.planner import Plan
from trimtab.plan.refusal import planned
from trimtab.plan.report import as_dict
from trimtab.plan.watch import PlanWatch
from trimtab.plan.work import job_of
from trimtab.record.checkpoint import RunState, prune
from trimtab.record.folder import ENGINE_LOGS, begin, claim
from trimtab.record.sinks import Sinks
from trimtab.rollout.engine import Engine
from trimtab.run.build import (
    calibrated,
    card_facts,
    is_automatic,
    load_policy,
    spare_the_collector,
    update_settings,
    use_planned_kernels,
)
from trimtab.run.inputs import Inputs
from trimtab.run.machine import load_within, machine_here
from trimtab.run.resume import load_or_init_state
from trimtab.run.shapes import loaded_models
from trimtab.run.stage import CheckedRun, OnWait, Stage
from trimtab.update.samples import has_reference
from trimtab.update.trainer import LocalTrainer
from trimtab.update.updater import Updater


@dataclass(frozen=True)
class Parts:
    """What computes: models, engine and updaters, as the plan has them."""

    config: Any
    """The config with `run` resolved."""
    plan: Plan
    policy: Policy
    reference: AnyPolicy | None
    engine: Engine
    updater: Updater
    critic: Updater | None
    governor: Governor
    meter: MemoryMeter


@dataclass(frozen=True)
class OpenRun:
    """A run that is put together."""

    config: Any
    ready: Any
    state: RunState
    stream: Stream[Any]
    engine: Engine
    trainer: LocalTrainer
    observer: LocalObserver


def open_run(
    stage: Stage,
    asked: AnyConfig,
    inputs: Inputs,
    stack: ExitStack,
    *,
    resume: bool = False,
    console_file: IO[str] | None = None,
) -> OpenRun:
    """Build a run. Whatever it opens is closed by `stack`, in the right order, also when a later part fails."""
    console = stack.enter_context(Console(asked.learn.steps or 1, file=console_file))
    console.waiting(stage.reading_note)
    ready = stage.check(asked, inputs, stack, resume=resume)
    config, folder = ready.config, ready.folder
    steps = console.history.total_steps = config.learn.steps
    stack.enter_context(claim(folder, resume))
    checkpoint, state, changed = load_or_init_state(config, ready.device, folder, ready.rows, resume, console)
    stage.init_state(config, state, None if checkpoint is None else changed)
    if ready.before_loading:
        console.note(ready.before_loading)
    recoveries = Recoveries(state, console.warn)
    parts = assemble(stage, ready, stack, recoveries, checkpoint, folder / ENGINE_LOGS, console.waiting)
    config = parts.config
    parts.engine.publish(state.version)
    trainer = _trainer(stage, parts, ready.tokenizer, recoveries)
    stack.callback(trainer.close)
    if checkpoint is not None:
        trainer.load(checkpoint)
        prune(folder, config.observe.keep_checkpoints, state.best_step)  # a kill may have come before it
    if checkpoint is None or state.step < steps:  # or nothing is learned with these settings
        begin(folder, config, as_dict(parts.plan))
    stream = stage.stream(config, ready, state.data_position)
    stack.callback(stream.close)
    sinks = Sinks(folder, config.observe, state.step if checkpoint else None)
    stack.callback(sinks.close)
    _tell_of_start(stage, ready, parts, state, console, inputs.verbose)
    spare_the_collector(stack)
    trainer.prepare_to_save()
    timeline = Timeline(folder, on_phase=console.working)
    trainer.writer.on_written = timeline.wrote_checkpoint
    observer = LocalObserver(
        folder, console, timeline, sinks, parts.meter, PlanWatch(parts.plan), recoveries, inputs.callbacks
    )
    stack.callback(observer.close)
    if lowered := trainer.recall(state.memory):
        values = ", ".join(f"{name} {value}" for name, value in lowered.items())
        console.note(f"this run ran out of memory before, so it keeps these lower settings: {values}")
    return OpenRun(config, ready, state, stream, parts.engine, trainer, observer)


def assemble(
    stage: Stage,
    ready: CheckedRun,
    stack: ExitStack,
    recoveries: Recoveries,
    checkpoint: Path | None = None,
    logs: Path | None = None,
    tell: OnWait = lambda what: None,
) -> Parts:
    """Load the models, plan with them, and build what the plan says. What lost processes of an engine wrote is kept in `logs`;
    what is waited for is told."""
    config, asked = ready.config, ready.config.run
    tell(f"loading {checkpoint or config.model.path}")
    policy, reference = load_within(asked, ready.device, load_policies, config, ready.device, checkpoint)
    job = job_of(config, loaded_models(config, policy), ready.lengths)
    plan = planned(asked, job, machine_here(ready.device))
    torch.set_num_threads(plan.run.threads)
    use_planned_kernels(plan, policy, reference)
    reference = _put_away(reference, plan.run)  # an engine takes its memory when it is made
    plan, engine = stage.open_engine(ready, plan, policy, recoveries, logs, tell)
    stack.callback(engine.close)
    reference = _put_away(reference, plan.run)
    stage.load_rewards(ready, policy, tell)
    tell("preparing the update")
    meter = MemoryMeter(ready.device, outside=lambda: engine.non_torch_bytes)
    updater = Updater(
        policy,
        stage.objective(config, policy),
        config.learn,
        **update_settings(plan.run),
        metered=lambda: meter.phase("optimizer"),
    )
    automatic = is_automatic(asked, plan)
    plan = calibrated(plan, asked, updater, engine) if stage.rehearses else plan
    sampled = isinstance(config, ResolvedConfig)
    updates = config.learn.updates_per_batch if sampled else 1
    config = with_plan(config, plan.run) if sampled else with_offline_plan(config, plan.run)
    critic = stage.open_critic(config, policy)
    governor = Governor(plan, automatic, asked.checkpoint_activations == "auto", updates)
    return Parts(config, plan, policy, reference, engine, updater, critic, governor, meter)


def load_policies(config: AnyConfig, device: torch.device, checkpoint: Path | None) -> tuple[Policy, AnyPolicy | None]:
    """The policy, and the model that it began as where they are compared."""
    policy = load_policy(config.model, config.learn.seed, device, config.run.kernels, checkpoint)
    if not (isinstance(config, ResolvedConfig) and has_reference(config.learn)):
        return policy, None
    if config.model.lora is not None:
        return policy, WithoutAdapters(policy)
    reference = Policy(load_model(config.model, device).requires_grad_(False), check=False)
    use_kernels(reference, config.run.kernels)
    return policy, reference


def _put_away(reference: AnyPolicy | None, run: ResolvedRun) -> AnyPolicy | None:
    """A reference that waits in host memory, where the plan has it there."""
    if not run.offload.reference or not isinstance(reference, Policy):
        return reference
    device = reference.device
    away = FromHost(reference)
    free(device)  # another process cannot use what torch keeps
    return away


def _trainer(stage: Stage, parts: Parts, tokenizer: Any, recoveries: Recoveries) -> LocalTrainer:
    job = parts.plan.job
    return LocalTrainer(
        parts.updater,
        parts.engine,
        parts.governor,
        tokenizer,
        reference=parts.reference,
        critic=parts.critic,
        longest=job.longest_sequence if job.generates else job.longest_trained,
        shorter=stage.shorter(parts.config),
        copy_checkpoints=CHECKPOINT_COPY in parts.plan.ledger["checkpoint"].host,
        report=recoveries.of_policy,
        report_critic=recoveries.of_critic,
    )


def _tell_of_start(
    stage: Stage, ready: CheckedRun, parts: Parts, state: RunState, console: Console, verbose: bool
) -> None:
    """The start card, and what else the user should know before the first step."""
    config, policy = parts.config, parts.policy
    example = stage.view(ready, stop_token_ids(policy.model, ready.tokenizer))
    card = StartCard(
        **card_facts(config, policy, parts.plan),
        **stage.card(config, ready, parts.engine),
        run_dir=ready.folder,
        data_rows=len(ready.rows),
        resumed_from=state.step or None,
        prompt=example.lines(),
    )
    console.card(card, verbose)
    if example.warning:
        console.warn(example.warning)
    for note in filter(None, ready.notes):
        console.note(note)
    if state.step >= config.learn.steps:
        console.note(f"all {state.step} steps are done already; exporting the model again")
