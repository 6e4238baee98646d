"""Puts a run of any stage together, cheapest checks first: data and rewards are read and tried before any weight is loaded, and
the run folder is written only when nothing is left that could refuse the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from trimtab.config.load import AnyConfig
from trimtab.data.stream import Stream
from trimtab.observe.card import StartCard
from trimtab.observe.console import Console
from trimtab.observe.device_watch import DeviceWatch, open_device_watch
from trimtab.observe.journal import Journal
from trimtab.observe.look_back import report_of_broken_run
from trimtab.observe.observer import LocalObserver, Meters, SampleChoice, Writers
from trimtab.observe.recoveries import Recoveries
from trimtab.observe.timeline import Timeline
from trimtab.plan.report import as_recorded
from trimtab.plan.watch import PlanWatch
from trimtab.record.checkpoint import RunState, prune
from trimtab.record.folder import begin, claim
from trimtab.record.record_writer import RecordWriter
from trimtab.record.sinks import Sinks
from trimtab.rollout.engine import Engine
from trimtab.run.assemble import AnyTrainer, BuiltRun, assemble_here
from trimtab.run.assemble_ranks import RankPlan, assemble_ranks, plan_ranks
from trimtab.run.assemble_split import SplitPlan, assemble_split, plan_split, split_sizes
from trimtab.run.build import card_facts, spare_the_collector
from trimtab.run.facts import run_facts, uuids_of
from trimtab.run.inputs import Inputs
from trimtab.run.profile import check_profile, open_profile
from trimtab.run.ray_hosts import RayHosts, open_hosts
from trimtab.run.resume import load_or_init_state
from trimtab.run.stage import CheckedRun, Stage
from trimtab.run.stalls import watch_for_stalls


@dataclass(frozen=True)
class OpenRun:
    """A run that is put together."""

    config: Any
    ready: Any
    checkpoint: Path | None
    """What it resumes from."""
    state: RunState
    stream: Stream[Any]
    engine: Engine
    trainer: AnyTrainer
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
    console, journal = stack.enter_context(Console(asked.learn.steps or 1, file=console_file)), Journal()
    console.on_event = journal.event
    if inputs.lost:
        console.warn(f"{inputs.lost}\nAll ranks start again", "rank")
    opened = open_hosts(asked.run, inputs.devices_before, console.waiting)
    inputs = replace(inputs, hosts=stack.enter_context(opened))
    console.waiting(stage.reading_note)
    ready = stage.check(asked, inputs, stack, resume=resume)
    config, folder = ready.config, ready.folder
    steps = console.history.total_steps = config.learn.steps
    stack.enter_context(claim(folder, resume))
    stack.callback(report_of_broken_run, folder, console)
    stack.push(journal.exit)
    checkpoint, state, changed = load_or_init_state(config, ready.device, folder, ready.rows, resume, console)
    state.rank_restarts = max(state.rank_restarts, inputs.rank_restarts)
    stage.init_state(config, state, None if checkpoint is None else changed)
    if ready.before_loading:
        console.note(ready.before_loading)
    recoveries = Recoveries(state, console.warn)
    planned = plan_of(ready, inputs.hosts)
    profiled = check_profile(
        inputs.profile, state.step, steps, 1 if planned is None else len(planned.devices), console.warn
    )
    parts = _builder(planned)(stage, ready, stack, recoveries, checkpoint, folder, console.waiting)
    config, trainer = parts.config, parts.trainer
    parts.engine.publish(state.version)
    if checkpoint is not None:
        prune(folder, config.observe.keep_checkpoints, state.best_step)  # a kill may have come before it
    if checkpoint is None or state.step < steps:  # or nothing is learned with these settings
        begin(folder, config, as_recorded(parts.plan, asked.run))
    stream = stage.stream(config, ready, state.data_position)
    stack.callback(stream.close)
    resumed_from = state.step if checkpoint else None
    devices = _watch(parts, stack)
    watch = None if planned is not None else watch_for_stalls(ready.config, folder, parts, journal, console, stack)
    looks = [each.look for each in (parts.meter.host_peaks, devices, watch) if each is not None]
    journal.open(folder, resumed_from, steps, run_facts(asked, config, parts, folder, inputs), looks)
    sinks = Sinks(folder, config.observe, resumed_from)
    stack.callback(sinks.close)
    _tell_of_start(stage, ready, parts, state, console, inputs.verbose)
    spare_the_collector(stack)
    trainer.prepare_to_save()
    profile = open_profile(profiled, parts.ranks, folder, ready.device, state.step, console.note)
    writers = Writers(
        journal,
        Timeline(folder, on_phase=console.working, steps=steps),
        sinks,
        RecordWriter(folder, resumed_from),
    )
    meters = Meters(parts.meter, PlanWatch(parts.plan), recoveries, devices, profile)
    kept = SampleChoice(config.observe.samples_rows, config.learn.seed, stage.task_of(ready))
    observer = LocalObserver(folder, state, console, writers, meters, kept, inputs.callbacks)
    trainer.tell_written(observer.wrote_checkpoint)
    trainer.on_move = observer.moved
    stack.callback(observer.close)
    if lowered := trainer.recall(state.memory):
        values = ", ".join(f"{name} {value}" for name, value in lowered.items())
        console.note(f"this run ran out of memory before, so it keeps these lower settings: {values}")
    return OpenRun(config, ready, checkpoint, state, stream, parts.engine, trainer, observer)


def _watch(parts: BuiltRun, stack: ExitStack) -> DeviceWatch | None:
    """Looks at the run's GPUs while it goes on."""
    devices = open_device_watch(uuids_of(parts.gpus)) if parts.gpus else None
    if devices is not None:
        stack.callback(devices.close)
    return devices


def plan_of(ready: CheckedRun, hosts: RayHosts | None) -> RankPlan | SplitPlan | None:
    """The plan of a run on several devices; None where it runs on one, whose plan is made with its models."""
    sizes = split_sizes(ready.config)
    return plan_ranks(ready, hosts) if sizes is None else plan_split(ready, sizes, hosts)


def _builder(planned: RankPlan | SplitPlan | None) -> Callable[..., BuiltRun]:
    if isinstance(planned, SplitPlan):
        return partial(assemble_split, planned)
    return assemble_here if planned is None else partial(assemble_ranks, planned)


def _tell_of_start(
    stage: Stage, ready: CheckedRun, parts: BuiltRun, state: RunState, console: Console, verbose: bool
) -> None:
    """The start card, and what else the user should know before the first step."""
    config = parts.config
    example = stage.view(ready, parts.facts.stop_token_ids)
    card = StartCard(
        **card_facts(config, parts.facts, parts.plan),
        **stage.card(config, ready, parts.engine),
        run_dir=ready.folder,
        data_rows=len(ready.rows),
        resumed_from=state.step or None,
        prompt=example.lines(),
    )
    console.card(card, verbose)
    if example.warning:
        console.warn(example.warning)
    for note in filter(None, (*ready.notes, *parts.notes)):
        console.note(note)
    if state.step >= config.learn.steps:
        console.note(f"all {state.step} steps are done already; exporting the model again")
