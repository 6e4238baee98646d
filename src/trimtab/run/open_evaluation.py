"""Puts an evaluation together: a model, held-out prompts and their rewards."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.resolved import ResolvedConfig, eval_in_words, resolve_config
from trimtab.config.schema import Config
from trimtab.data.prompt import Prompt
from trimtab.model.load import load_model, load_tokenizer
from trimtab.model.policy import Policy
from trimtab.observe.console import Console
from trimtab.observe.recoveries import Recoveries
from trimtab.observe.tasks import Tasks
from trimtab.plan.refusal import plan_here
from trimtab.plan.work import Lengths, evaluation_job_of
from trimtab.record.checkpoint import RunState
from trimtab.reward.scorer import Scorer
from trimtab.rollout.engine import Engine
from trimtab.rollout.external.find import refuse_without_engine
from trimtab.rollout.generator import LocalGenerator
from trimtab.run.build import spare_the_collector
from trimtab.run.engines import EnvironmentSession, external_note, open_engine, sampler_on
from trimtab.run.evaluate_on_ranks import open_fleet, plan_evaluation
from trimtab.run.inputs import Inputs
from trimtab.run.machine import load_within, machine_here, memory_limit, pick_device
from trimtab.run.rollout_data import (
    open_hosts,
    open_replies,
    open_scorer,
    prompt_limit,
    read_eval,
    with_found_rewards,
)
from trimtab.run.shapes import evaluated_models


@dataclass
class Evaluation:
    """A model, held-out prompts and their rewards: all that a score needs."""

    config: ResolvedConfig
    generator: LocalGenerator
    rewarder: Scorer
    prompts: list[Prompt]
    console: Console
    tasks: Tasks | None


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
    console.waiting("reading the tokenizer and the data, and starting the reward workers")
    limit = prompt_limit(config)
    tokenizer = load_tokenizer(config.model)
    hosts = open_hosts(config, inputs, tokenizer)
    if hosts is not None:
        stack.callback(hosts.close)
    tools = hosts.loaded.schemas if hosts else ()
    held_out = read_eval(config, inputs, tokenizer, limit, tools)
    replies = open_replies(config, hosts, tokenizer, [held_out.columns], held_out.prompts[0].tokens)
    environment = EnvironmentSession(hosts, replies) if hosts is not None and replies is not None else None
    scorer = open_scorer(config, inputs, [held_out.columns])
    stack.callback(scorer.close)
    if note := external_note(config.run):
        console.note(note)
    console.waiting(f"loading {config.model.path}")
    lengths = Lengths(held_out.longest, held_out.longest, len(held_out.prompts))
    planned = plan_evaluation(config, device, lengths)
    if planned is not None:
        engine: Engine = open_fleet(planned, config, tokenizer, scorer.models, stack)
    else:
        engine = _engine_here(config, device, tokenizer, lengths, scorer, console)
    stack.callback(engine.close)
    for note in (held_out.note, f"sampling: {eval_in_words(config)}"):
        if note:
            console.note(note)
    spare_the_collector(stack)
    column = config.data.task
    tasks = None if column is None else Tasks.found(column, [prompt.columns for prompt in held_out.prompts])
    generator = LocalGenerator(engine, sampler_on(engine, environment), lambda what, work: work())
    return Evaluation(config, generator, scorer, held_out.prompts, console, tasks)


def _engine_here(
    config: ResolvedConfig, device: torch.device, tokenizer: Any, lengths: Lengths, scorer: Scorer, console: Console
) -> Engine:
    """Load the models, plan with them, and open the engine that the plan names."""
    policy = Policy(load_within(config.run, device, load_model, config.model, device))
    if scorer.models is not None:
        scorer.models.load(policy.device, policy.dtype)
    job = evaluation_job_of(config, evaluated_models(config, policy), lengths)
    whole = dict.fromkeys(("devices", "shard", "shard_devices", "sequence_parallel"), "auto")
    alone = config.run.with_values(whole)
    plan = plan_here(alone, job, machine_here(device))
    torch.set_num_threads(plan.run.threads)
    console.waiting(f"starting the {plan.run.engine} engine")
    # What an engine survives is not told: there is no run that it belongs to.
    _, engine = open_engine(config, plan, policy, tokenizer, Recoveries(RunState(), lambda line, kind: None))
    return engine
