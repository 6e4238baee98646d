"""A run on several devices: first a plan, without weights; then one rank a device loads its models and builds its part."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trimtab.cluster.fleet import Fleet
from trimtab.cluster.mesh import open_store
from trimtab.cluster.ranks import Ranks
from trimtab.cluster.trainer import RankedTrainer
from trimtab.cluster.updater import RankedUpdater
from trimtab.config.resolved import ResolvedConfig, with_offline_plan, with_plan
from trimtab.config.run import Run
from trimtab.observe.rank_meter import RankMeter
from trimtab.observe.recoveries import Recoveries
from trimtab.plan.governor import Governor
from trimtab.plan.planner import Plan
from trimtab.plan.refusal import planned
from trimtab.plan.work import job_of
from trimtab.rollout.no_rollout import NoRollout
from trimtab.run.assemble import BuiltRun
from trimtab.run.build import is_automatic
from trimtab.run.machine import machine_here
from trimtab.run.rank import RankFacts, RankSetup
from trimtab.run.shapes import shape_of, stated_models
from trimtab.run.stage import CheckedRun, OnWait, Stage
from trimtab.update.guard import Guard
from trimtab.update.shares import Cost

RANK_LOGS = "ranks"
"""Folder of a run that holds a log for each rank."""
STALL_STEPS = 5
"""Work that stands still for so many predicted steps hangs."""
_sets = itertools.count()
"""Sets of ranks that this process has started."""


def runs_on_ranks(run: Run, device: torch.device) -> bool:
    """More than one device is asked for."""
    return run.devices != "auto" and run.devices > 1


def assemble_ranks(
    stage: Stage,
    ready: CheckedRun,
    stack: ExitStack,
    recoveries: Recoveries,
    checkpoint: Path | None,
    folder: Path,
    tell: OnWait,
) -> BuiltRun:
    """All of a run on ranks, as it began or as a checkpoint left it."""
    plan = plan_for_ranks(ready)
    ranks = _start(stage, ready, plan, checkpoint, folder / RANK_LOGS, recoveries)
    stack.callback(ranks.close)
    tell(f"loading {checkpoint or ready.config.model.path} on {len(ranks)} ranks")
    facts: list[RankFacts] = ranks.wait_until_built()
    sampled = isinstance(ready.config, ResolvedConfig)
    config: Any = with_plan(ready.config, plan.run) if sampled else with_offline_plan(ready.config, plan.run)
    engine = Fleet(ranks, facts[0].engine, [each.lowered for each in facts])
    trainer = _trainer(stage, ready, config, plan, ranks, facts, engine, recoveries)
    stack.callback(trainer.close)
    total = facts[0].policy.device_total_gib
    meter = RankMeter(ranks, None if total is None else int(total * 2**30))
    return BuiltRun(config, plan, facts[0].policy, engine, trainer, meter)


def plan_for_ranks(ready: CheckedRun) -> Plan:
    """The plan of a run on several devices, from the model's description alone."""
    config, asked = ready.config, ready.config.run
    machine = replace(machine_here(ready.device), devices=asked.devices)
    if machine.cpu:
        machine = replace(machine, cores=max(1, machine.cores // asked.devices))
    shape = shape_of(config.model.path, config.model.trust_remote_code)
    models = stated_models(config, shape, machine.cpu, machine.device.tiled_head)
    return planned(asked, job_of(config, models, ready.lengths), machine)


def _start(
    stage: Stage, ready: CheckedRun, plan: Plan, checkpoint: Path | None, logs: Path, recoveries: Recoveries
) -> Ranks:
    """Start a rank for each device."""
    store, count, cuda = open_store(), plan.run.devices, ready.device.type == "cuda"
    known = CheckedRun(ready.config, ready.device, ready.folder, ready.tokenizer, [], ready.lengths, ())
    prefix, backend = f"ranks-{os.getpid()}-{next(_sets)}", "nccl" if cuda else "gloo"
    setups = [
        RankSetup(
            rank, count, store.port, prefix, backend, f"cuda:{rank}" if cuda else "cpu", stage, known, plan, checkpoint
        )
        for rank in range(count)
    ]
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(plan.run.threads)}

    def tell(kind: str, text: str) -> None:
        (recoveries.restarted if kind == "restarted" else recoveries.of_engine)(text)

    ranks = Ranks(
        "trimtab.run.rank",
        setups,
        logs,
        variables=[variables] * count,
        tell=tell,
        stall_s=STALL_STEPS * plan.times.total,
    )
    ranks.store = store  # it lives as long as they do
    return ranks


def _trainer(
    stage: Stage,
    ready: CheckedRun,
    config: Any,
    plan: Plan,
    ranks: Ranks,
    facts: list[RankFacts],
    engine: Fleet,
    recoveries: Recoveries,
) -> RankedTrainer:
    job, asked = plan.job, ready.config.run
    longest = job.longest_sequence if job.generates else job.longest_trained
    shape = job.shape
    cost = Cost(6.0 * shape.parameters, 12.0 * shape.hidden * shape.layers)
    full = plan.run.shard == "full"
    equal = full or plan.run.shard == "gradients"
    updaters = {
        name: RankedUpdater(ranks, name, [each.updaters[name] for each in facts], stage.together, cost, equal, full)  # type: ignore[arg-type]
        for name in facts[0].updaters
    }
    shorter = stage.shorter(config)
    guard = Guard(updaters["policy"], engine, least_kv_tokens=longest, shorter=shorter, report=recoveries.of_policy)
    critic = None
    if "critic" in updaters:
        critic = Guard(updaters["critic"], NoRollout(), least_kv_tokens=0, shorter=shorter, report=recoveries.of_critic)
    updates = config.learn.updates_per_batch if isinstance(config, ResolvedConfig) else 1
    governor = Governor(plan, is_automatic(asked, plan), asked.checkpoint_activations == "auto", updates)
    return RankedTrainer(ranks, guard, governor, critic)
