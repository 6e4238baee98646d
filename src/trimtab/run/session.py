"""Puts a run together, cheapest checks first: data and rewards are read and tried before any weight is loaded, and the run folder
is written only when nothing is left that could refuse the run.

A training session has a run folder, an optimizer and a stream of prompts. An evaluation has none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from trimtab.base.errors import ConfigError, EngineError, Problem
from trimtab.config.known import ResolvedRun
from trimtab.config.resolved import (
    PlannedConfig,
    ResolvedConfig,
    eval_in_words,
    resolve_config,
    with_plan,
)
from trimtab.config.schema import Config
from trimtab.data.prompt import Prompt
from trimtab.data.stream import PromptStream
from trimtab.model.adapters import refuse_unknown_targets
from trimtab.model.kernel_choice import use_kernels
from trimtab.model.load import (
    load_config,
    load_model,
    load_tokenizer,
    refuse_without_weights,
    stop_token_ids,
)
from trimtab.model.memory import free
from trimtab.model.policy import AnyPolicy, FromHost, Policy, WithoutAdapters, refuse_other_layers
from trimtab.observe.card import StartCard, rollout_batch
from trimtab.observe.console import Console
from trimtab.observe.host import HostWatch
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.tasks import Tasks
from trimtab.observe.timeline import Timeline
from trimtab.plan.governor import Governor
from trimtab.plan.planner import Choice, Plan
from trimtab.plan.refusal import plan_here, planned
from trimtab.plan.report import as_dict
from trimtab.plan.watch import PlanWatch
from trimtab.plan.work import Lengths, evaluation_job_of, job_of
from trimtab.record.checkpoint import RunState, load_optimizer, load_part, prune, reading
from trimtab.record.folder import ENGINE_LOGS, begin, claim, find_folder, refuse_existing
from trimtab.record.sinks import Sinks
from trimtab.reward.scorer import Scorer
from trimtab.rollout.conversations.episodes import Episodes
from trimtab.rollout.conversations.hosts import Hosts
from trimtab.rollout.conversations.replies import ReplyEncoder
from trimtab.rollout.engine import Engine, Sampler
from trimtab.rollout.external.engine import OutsideEngine
from trimtab.rollout.external.find import interpreter, refuse_without_engine
from trimtab.rollout.external.kinds import KINDS
from trimtab.rollout.native.engine import NativeEngine
from trimtab.run.build import (
    calibrated,
    card_facts,
    is_automatic,
    load_policy,
    make_updater,
    refuse_kernels,
    refuse_missing_wandb,
    spare_the_collector,
    take_up,
    use_planned_kernels,
)
from trimtab.run.inputs import (
    Callback,
    Inputs,
    Work,
    open_hosts,
    open_replies,
    open_scorer,
    prompt_limit,
    read_eval,
    read_tokenizer,
    read_work,
    refuse_other_critic,
    with_found_rewards,
)
from trimtab.run.machine import load_within, machine_here, memory_limit, pick_device
from trimtab.run.recovery import open_critic_guard, open_guard
from trimtab.run.shapes import evaluated_models, loaded_models
from trimtab.update.critic import Critic, restore_critic
from trimtab.update.guard import Guard
from trimtab.update.updater import Updater


@dataclass
class Session:
    """A training run with everything in place."""

    config: PlannedConfig
    folder: Path
    state: RunState
    resumed: bool
    tokenizer: Any
    policy: Policy
    reference: AnyPolicy | None
    engine: Engine
    sampler: Sampler
    """The engine, or the engine that talks with an environment."""
    updater: Updater
    scorer: Scorer
    stream: PromptStream
    eval_prompts: list[Prompt]
    console: Console
    timeline: Timeline
    sinks: Sinks
    meter: MemoryMeter
    guard: Guard
    host: HostWatch
    watch: PlanWatch
    governor: Governor
    tasks: Tasks | None
    critic: Critic | None
    """PPO's value model."""
    critic_guard: Guard | None
    callbacks: Sequence[Callback] = ()


@dataclass
class Evaluation:
    """A model, held-out prompts and their rewards: all that a score needs."""

    config: Config
    sampler: Sampler
    scorer: Scorer
    prompts: list[Prompt]
    console: Console
    tasks: Tasks | None


@dataclass(frozen=True)
class Checked:
    """A run that nothing short of its weights can refuse."""

    config: ResolvedConfig
    device: torch.device
    folder: Path
    work: Work
    tasks: Tasks | None
    scorer: Scorer
    talk: Talk | None


@dataclass(frozen=True)
class Talk:
    """What it takes to have conversations with an environment."""

    hosts: Hosts
    replies: ReplyEncoder


def sampler_on(engine: Engine, talk: Talk | None) -> Sampler:
    """The engine, or conversations of it with an environment."""
    return engine if talk is None else Episodes(engine, talk.hosts, talk.replies)


def check(asked: Config, inputs: Inputs, stack: ExitStack, *, resume: bool) -> Checked:
    """Try everything that needs no weights, cheapest first. Writes nothing."""
    device = pick_device(asked.run)
    stack.enter_context(memory_limit(asked.run, device))
    folder = find_folder(asked.observe.dir, inputs.name, resume)
    refuse_existing(folder, resume)
    refuse_without_engine(asked.run, device)
    refuse_missing_wandb(asked.observe)
    refuse_kernels(asked.run, asked.model, device)
    config = with_found_rewards(resolve_config(asked), inputs)
    tokenizer, limit = read_tokenizer(config)
    if not resume:  # or a checkpoint may have them
        refuse_without_weights(config.model)
    refuse_other_layers(config.model)
    hosts = open_hosts(config, inputs, tokenizer)
    if hosts is not None:
        stack.callback(hosts.close)
    work = read_work(config, inputs, tokenizer, limit, hosts.loaded.schemas if hosts else ())
    replies = open_replies(config, hosts, tokenizer, work.columns, work.first_prompt(config))
    if config.model.lora is not None:
        refuse_unknown_targets(config.model.lora, load_config(config.model), config.model.trust_remote_code)
    refuse_other_critic(config, work)
    tasks = work.tasks(config)
    scorer = open_scorer(config, inputs, work.columns, run_dir=folder)
    stack.callback(scorer.close)
    talk = Talk(hosts, replies) if hosts is not None and replies is not None else None
    return Checked(config, device, folder, work, tasks, scorer, talk)


def open_session(
    asked: Config, inputs: Inputs, stack: ExitStack, *, resume: bool = False, console_file: IO[str] | None = None
) -> Session:
    """Build a run. Whatever it opens is closed by `stack`, in the right order, also when a later part fails."""
    console = stack.enter_context(Console(asked.learn.steps, file=console_file))
    console.waiting("reading the tokenizer and the data, starting the rewards")
    ready = check(asked, inputs, stack, resume=resume)
    resolved, folder, work = ready.config, ready.folder, ready.work
    stack.enter_context(claim(folder, resume))
    checkpoint, state, changed = take_up(resolved, ready.device, folder, work.train.rows, resume, console)
    steered = resolved.learn.kl.target is not None and checkpoint is not None
    if not steered or any(change.startswith("learn.kl.coef ") for change in changed):
        state.kl_coef = resolved.learn.kl.coef
    _tell_of_start(resolved, console)
    parts = assemble(resolved, ready, stack, checkpoint, folder / ENGINE_LOGS, console.waiting)
    config, plan, policy, engine, updater = parts.config, parts.plan, parts.policy, parts.engine, parts.updater
    engine.publish(state.version)
    if checkpoint is not None:
        load_optimizer(checkpoint, updater.optimizer)
        if parts.critic is not None:
            with reading(checkpoint):
                restore_critic(checkpoint, parts.critic, load_part)
        prune(folder, config.observe.keep_checkpoints, state.best_step)  # a kill may have come before it
    if checkpoint is None or state.step < config.learn.steps:  # or nothing is learned with these settings
        begin(folder, config, as_dict(plan))
    stream = PromptStream(
        work.train.rows,
        config.data,
        work.tokenizer,
        max_prompt_tokens=work.limit,
        seed=config.learn.seed,
        position=state.data_position,
        tools=work.tools,
    )
    stack.callback(stream.close)
    sinks = Sinks(folder, config.observe, state.step if checkpoint else None)
    stack.callback(sinks.close)
    prompt = work.view(config, stop_token_ids(policy.model, work.tokenizer))
    done = state.step if checkpoint else None
    card = replace(_card(config, folder, policy, work, engine, plan, done), prompt=prompt.lines())
    console.card(card, inputs.verbose)
    for tell, note in ((console.warn, prompt.warning), (console.note, work.train.note), (console.note, work.eval.note)):
        if note:
            tell(note)
    if state.step >= config.learn.steps:
        console.note(f"all {state.step} steps are done; the model is exported again")
    spare_the_collector(stack)
    timeline = Timeline(folder, on_phase=console.working)
    stack.callback(timeline.close)
    meter = MemoryMeter(ready.device, outside=lambda: engine.outside_bytes)
    updater.metered = lambda: meter.phase("optimizer")
    critic_guard = None if parts.critic is None else open_critic_guard(parts.critic, state, console, timeline)
    return Session(
        config=config,
        folder=folder,
        state=state,
        resumed=checkpoint is not None,
        tokenizer=work.tokenizer,
        policy=policy,
        reference=parts.reference,
        engine=engine,
        sampler=sampler_on(engine, ready.talk),
        updater=updater,
        scorer=ready.scorer,
        stream=stream,
        eval_prompts=work.eval.prompts,
        console=console,
        timeline=timeline,
        sinks=sinks,
        meter=meter,
        guard=open_guard(updater, engine, state, console, timeline, plan.job.longest_sequence),
        host=HostWatch(console.warn),
        watch=PlanWatch(plan),
        governor=parts.governor,
        tasks=ready.tasks,
        critic=parts.critic,
        critic_guard=critic_guard,
        callbacks=inputs.callbacks,
    )


@dataclass(frozen=True)
class Parts:
    """What computes: models, engine and updater, as the plan has them."""

    config: PlannedConfig
    plan: Plan
    policy: Policy
    reference: AnyPolicy | None
    engine: Engine
    updater: Updater
    governor: Governor
    critic: Critic | None = None


def assemble(
    config: ResolvedConfig,
    ready: Checked,
    stack: ExitStack,
    checkpoint: Path | None = None,
    logs: Path | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Parts:
    """Load the models, plan with them, and build what the plan says. What lost processes of an engine wrote is kept in `logs`;
    what is waited for is told."""
    tell(f"loading {checkpoint or config.model.path}")
    policy, reference = load_within(config.run, ready.device, _load_policies, config, ready.device, checkpoint)
    job = job_of(config, loaded_models(config, policy), ready.work.lengths)
    plan = planned(config.run, job, machine_here(ready.device))
    torch.set_num_threads(plan.run.threads)
    use_planned_kernels(plan, policy, reference)
    tell(f"starting the {plan.run.engine} engine")
    reference = _put_away(reference, plan.run)  # an engine takes its memory when it is made
    plan, engine = open_engine(config, plan, policy, ready.work.tokenizer, logs)
    stack.callback(engine.close)
    asked, run = config.run, plan.run
    reference = _put_away(reference, run)
    if ready.scorer.models is not None:
        tell("loading the reward models")
        ready.scorer.models.load(policy.device, policy.dtype)
    tell("preparing the update")
    updater = make_updater(policy, config.learn, run, Updater)
    automatic = is_automatic(asked, plan)
    plan = calibrated(plan, asked, updater, engine)
    planned_config = with_plan(config, plan.run)
    critic = _load_critic(planned_config, policy) if config.learn.advantage == "gae" else None
    governor = Governor(plan, automatic, asked.checkpoint_activations == "auto", config.learn.updates_per_batch)
    return Parts(planned_config, plan, policy, reference, engine, updater, governor, critic)


def _put_away(reference: AnyPolicy | None, run: ResolvedRun) -> AnyPolicy | None:
    """A reference that waits in host memory, where the plan has it there."""
    if not run.offload.reference or not isinstance(reference, Policy):
        return reference
    device = reference.device
    away = FromHost(reference)
    free(device)  # another process cannot use what torch keeps
    return away


def open_evaluation(
    asked: Config, inputs: Inputs, stack: ExitStack, *, console_file: IO[str] | None = None
) -> Evaluation:
    """Build what measures a model: no optimizer, no training data, no run folder."""
    config = with_found_rewards(resolve_config(asked), inputs)
    if config.data.eval is None and inputs.eval_rows is None:
        raise ConfigError([Problem("data.eval", "there is nothing to evaluate on", "Name a data set or a task.")])
    device = pick_device(config.run)
    stack.enter_context(memory_limit(config.run, device))
    refuse_without_engine(config.run, device)
    console = stack.enter_context(Console(1, file=console_file))
    console.waiting("reading the tokenizer and the data, starting the rewards")
    limit = prompt_limit(config)
    tokenizer = load_tokenizer(config.model)
    hosts = open_hosts(config, inputs, tokenizer)
    if hosts is not None:
        stack.callback(hosts.close)
    tools = hosts.loaded.schemas if hosts else ()
    held_out = read_eval(config, inputs, tokenizer, limit, tools)
    replies = open_replies(config, hosts, tokenizer, [held_out.columns], held_out.prompts[0].tokens)
    talk = Talk(hosts, replies) if hosts is not None and replies is not None else None
    scorer = open_scorer(config, inputs, [held_out.columns])
    stack.callback(scorer.close)
    _tell_of_start(config, console)
    console.waiting(f"loading {config.model.path}")
    policy = Policy(load_within(config.run, device, load_model, config.model, device))
    if scorer.models is not None:
        scorer.models.load(policy.device, policy.dtype)
    lengths = Lengths(held_out.longest, held_out.longest, len(held_out.prompts))
    job = evaluation_job_of(config, evaluated_models(config, policy), lengths)
    plan = plan_here(config.run, job, machine_here(device))
    torch.set_num_threads(plan.run.threads)
    console.waiting(f"starting the {plan.run.engine} engine")
    plan, engine = open_engine(config, plan, policy, tokenizer)
    stack.callback(engine.close)
    for note in (held_out.note, f"sampling: {eval_in_words(config)}"):
        if note:
            console.note(note)
    spare_the_collector(stack)
    column = config.data.task
    tasks = None if column is None else Tasks.found(column, [prompt.columns for prompt in held_out.prompts])
    return Evaluation(config, sampler_on(engine, talk), scorer, held_out.prompts, console, tasks)


def _tell_of_start(config: Config, console: Console) -> None:
    if config.run.outside:
        console.note(f"{KINDS[config.run.engine].title} is started; that takes a minute or so")


def open_engine(
    config: Config, plan: Plan, policy: Policy, tokenizer: Any, logs: Path | None = None
) -> tuple[Plan, Engine]:
    """The engine that a plan names. Where that is not what was asked for and cannot be had, the native one, with a plan of its
    own."""
    longest = plan.job.longest_sequence
    try:
        return plan, make_engine(plan.run, policy, tokenizer, longest, logs)
    except EngineError as error:
        if config.run.engine != "auto" or not plan.run.outside:
            raise
        refused = f"{plan.run.engine} was planned: {str(error).splitlines()[0]}"
    plan = planned(config.run.with_values({"engine": "native"}), plan.job, plan.machine)
    plan = replace(plan, choices=(*plan.choices, Choice("run.engine", "native", refused)))
    return plan, make_engine(plan.run, policy, tokenizer, longest)


def make_engine(run: ResolvedRun, policy: Policy, tokenizer: Any, longest: int, logs: Path | None = None) -> Engine:
    """The rollout engine of a plan, for sequences of so many tokens."""
    rollout = run.rollout
    settings: dict[str, Any] = {
        "policy": policy,
        "tokenizer": tokenizer,
        "stop_token_ids": stop_token_ids(policy.model, tokenizer),
        "kv_bytes": rollout.kv_memory,
        "page_tokens": rollout.page_tokens,
        "max_sequences": rollout.max_sequences,
        "prefill_tokens": rollout.prefill_tokens,
        "prefix_cache": rollout.prefix_cache,
        "lend_memory": rollout.lend_memory,
    }
    if run.engine == "native":
        return NativeEngine(**settings)
    eager = policy.device.type == "cpu" if rollout.eager is None else rollout.eager
    python = interpreter(rollout.python)
    settings |= {"longest": longest, "eager": eager, "python": python, "processes": rollout.processes}
    settings |= {"tensor_parallel": rollout.tensor_parallel, "logs": logs}
    return OutsideEngine(KINDS[run.engine], **settings)


def _load_policies(config: Config, device: torch.device, checkpoint: Path | None) -> tuple[Policy, AnyPolicy | None]:
    policy = load_policy(config.model, config.learn.seed, device, config.run.kernels, checkpoint)
    if config.learn.kl.coef == 0:
        return policy, None
    if config.model.lora is not None:
        return policy, WithoutAdapters(policy)
    reference = Policy(load_model(config.model, device).requires_grad_(False), check=False)
    use_kernels(reference, config.run.kernels)
    return policy, reference


def _load_critic(config: PlannedConfig, policy: Policy) -> Critic:
    """The value model, with the plan's sizes."""
    learn, run = config.learn, config.run
    source = config.model.with_values({"path": learn.critic.path or config.model.path})
    model = load_policy(source, learn.seed, policy.device, run.kernels)
    return make_updater(model, learn, run, Critic)


def _card(
    config: Config, folder: Path, policy: Policy, work: Work, engine: Engine, plan: Plan, done: int | None
) -> StartCard:
    learn = config.learn
    return StartCard(
        **card_facts(config, policy, plan),
        run_dir=folder,
        algorithm=f"{learn.algorithm} ({learn.advantage} advantage, {learn.loss} loss, {learn.aggregate})",
        batch=rollout_batch(
            learn.prompts_per_step, learn.samples_per_prompt, learn.max_new_tokens, learn.updates_per_batch
        ),
        data_rows=len(work.train.rows),
        eval_rows=len(work.eval.prompts) or None,
        evaluation=eval_in_words(config) if work.eval.prompts else None,
        engine=engine.description,
        resumed_from=done,
    )
