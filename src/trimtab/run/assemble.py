"""A run on one device: its models are loaded, a plan is made with them, and what the plan says is built in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.cluster.ranks import Ranks
from trimtab.cluster.trainer import RankedTrainer
from trimtab.config.resolved import ResolvedConfig, with_offline_plan, with_plan
from trimtab.model.policy import AnyPolicy, Policy
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.rank_meter import RankMeter
from trimtab.observe.recoveries import Recoveries
from trimtab.plan.governor import Governor
from trimtab.plan.ledger import CHECKPOINT_COPY
from trimtab.plan.planner import Plan
from trimtab.plan.refusal import planned
from trimtab.plan.work import job_of
from trimtab.record.folder import ENGINE_LOGS
from trimtab.rollout.engine import Engine
from trimtab.run.build import (
    PolicyFacts,
    calibrated,
    is_automatic,
    policy_facts,
    update_settings,
    use_planned_kernels,
)
from trimtab.run.calibrate import probe
from trimtab.run.machine import load_within, machine_here
from trimtab.run.models import load_policies, put_reference_away
from trimtab.run.shapes import loaded_models, refuse_unreadable
from trimtab.run.stage import CheckedRun, OnWait, Stage
from trimtab.update.peers import ALONE
from trimtab.update.trainer import LocalTrainer
from trimtab.update.updater import Updater

AnyTrainer = LocalTrainer | RankedTrainer


@dataclass(frozen=True)
class BuiltRun:
    """What computes in a run, wherever it is."""

    config: Any
    """The config with `run` resolved."""
    plan: Plan
    facts: PolicyFacts
    engine: Engine
    trainer: AnyTrainer
    meter: MemoryMeter | RankMeter
    notes: Sequence[str] = ()
    """What the user should know of how it runs."""
    gpus: Sequence[str] = ()
    """The GPUs that it runs on, as torch names them."""
    ranks: Ranks | None = None
    """Where it runs on several devices: one of them each."""


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


def assemble_here(
    stage: Stage,
    ready: CheckedRun,
    stack: ExitStack,
    recoveries: Recoveries,
    checkpoint: Path | None,
    folder: Path,
    tell: OnWait,
) -> BuiltRun:
    """All of a run on one device, as it began or as a checkpoint left it."""
    parts = assemble(stage, ready, stack, recoveries, checkpoint, folder / ENGINE_LOGS, tell)
    trainer = _trainer(stage, parts, ready.tokenizer, recoveries)
    stack.callback(trainer.close)
    if checkpoint is not None:
        trainer.load(checkpoint)
    facts = policy_facts(parts.policy, ready.tokenizer)
    gpus = [str(ready.device)] if ready.device.type == "cuda" else []
    return BuiltRun(parts.config, parts.plan, facts, parts.engine, trainer, parts.meter, gpus=gpus)


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
    machine = machine_here(ready.device)
    refuse_unreadable(config, ready.lengths, machine)
    tell(f"loading {checkpoint or config.model.path}")
    policy, reference = load_within(asked, ready.device, load_policies, config, ready.device, checkpoint)
    job = job_of(config, loaded_models(config, policy), ready.lengths)
    plan = planned(asked, job, machine)
    torch.set_num_threads(plan.run.threads)
    use_planned_kernels(plan, policy, reference)
    reference = put_reference_away(reference, plan.run)  # an engine takes its memory when it is made
    plan, engine = stage.open_engine(ready, plan, policy, recoveries, logs, tell)
    stack.callback(engine.close)
    reference = put_reference_away(reference, plan.run)
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
    if stage.rehearses:
        plan = calibrated(plan, asked, [updater], engine, partial(probe, updater))
    sampled = isinstance(config, ResolvedConfig)
    updates = config.learn.updates_per_batch if sampled else 1
    config = with_plan(config, plan.run) if sampled else with_offline_plan(config, plan.run)
    critic = stage.open_critic(config, policy.device, None, ALONE)
    governor = Governor(plan, automatic, asked.checkpoint_activations == "auto", updates)
    return Parts(config, plan, policy, reference, engine, updater, critic, governor, meter)


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
