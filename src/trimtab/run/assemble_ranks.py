"""A run on several devices: first a plan, without weights; then one rank a device loads its models and builds its part."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.base.errors import ConfigError, EngineError, Problem
from trimtab.cluster.fleet import Fleet
from trimtab.cluster.mesh import LOCALHOST, open_store
from trimtab.cluster.process import StartRank, start_here
from trimtab.cluster.ranks import Ranks
from trimtab.cluster.rewards import RankedClassifier
from trimtab.cluster.trainer import RankedTrainer, RoleSet
from trimtab.cluster.transfer import ChannelSetup
from trimtab.cluster.updater import RankedUpdater
from trimtab.config.resolved import ResolvedConfig, with_offline_plan, with_plan
from trimtab.config.row_ranks import row_ranks
from trimtab.config.run import Run
from trimtab.model.load import resolve_dtype
from trimtab.observe.rank_meter import RankMeter
from trimtab.observe.recoveries import Recoveries
from trimtab.observe.stall_watch import STALL_STEPS
from trimtab.plan.governor import Governor
from trimtab.plan.job import Job, Machine
from trimtab.plan.planner import Choice, Plan
from trimtab.plan.refusal import plan_devices
from trimtab.plan.work import job_of
from trimtab.record.layout import RANK_LOGS
from trimtab.rollout.engine import Engine
from trimtab.rollout.no_rollout import NoRollout
from trimtab.run.assemble import BuiltRun
from trimtab.run.build import calibrated, is_automatic
from trimtab.run.calibrate import worst
from trimtab.run.engines import gives_way, native_instead
from trimtab.run.machine import machine_of_run
from trimtab.run.rank import RankFacts, RankSetup
from trimtab.run.ray_hosts import RayHosts, paths_of
from trimtab.run.role_rank import RoleFacts, RoleSetup
from trimtab.run.same_ranks import refuse_unequal_software
from trimtab.run.shapes import shape_of, stated_models
from trimtab.run.stage import CheckedRun, OnWait, Stage
from trimtab.update.guard import Guard
from trimtab.update.shares import Cost
from trimtab.update.stats import Trained

RECORDED_COLLECTIVES = 2000
"""That a rank remembers, for when it hangs."""
_sets = itertools.count()
"""Sets of ranks that this process has started."""


@dataclass(frozen=True)
class RankPlan:
    """A plan for several devices, and which these are."""

    plan: Plan
    devices: tuple[str, ...]
    """By rank, as torch names them."""
    machine: Machine
    """All that could be used."""
    notes: tuple[str, ...] = ()
    """What the user should know of devices that are left out."""
    hosts: RayHosts | None = None
    """Where they are; None: on this machine."""

    @property
    def backend(self) -> str:
        """NCCL wants a GPU for each rank."""
        own = self.hosts is not None or len(set(self.devices)) == len(self.devices)
        own_gpus = "cpu" not in self.devices and own
        return "nccl" if own_gpus else "gloo"


def plan_ranks(ready: CheckedRun, hosts: RayHosts | None = None, asked: Run | None = None) -> RankPlan | None:
    """The plan of a run on several devices, from the model's description alone; None where it runs on one. `asked`: what is asked
    for instead of the config's own."""
    config = ready.config

    def job(machine: Machine) -> Job:
        shape = shape_of(config.model.path, config.model.trust_remote_code)
        models = stated_models(config, shape, machine.cpu, machine.device.tiled_head)
        return job_of(config, models, ready.lengths)

    run = asked or config.run
    if hosts is not None:
        return _plan_over_hosts(run, hosts, job)
    if resolve_dtype(config.model, ready.device) == torch.float16:
        run = on_one_device(run)
    return plan_over(run, ready.device, job)


def on_one_device(run: Run) -> Run:
    """A run in float16, whose loss scale is not shared yet; raises where it asks for several devices."""
    if run.devices in ("auto", 1) and run.placement in ("auto", "colocated"):
        return run.with_values({"devices": 1})
    asked = "run.devices" if run.placement in ("auto", "colocated") else "run.placement"
    what = f"float16 is trained on one device, and {asked} asks for several: its loss scale is not shared yet"
    raise ConfigError([Problem("model.dtype", what, "Write run.devices: 1, or model.dtype: float32.")])


def _plan_over_hosts(run: Run, hosts: RayHosts, job: Callable[[Machine], Job]) -> RankPlan:
    """The plan of a job over a Ray cluster. It has ranks also where there is one device: the driver need not have any."""
    refuse_engines_of_several_actors(run, hosts)
    asked = hosts.asked(run)
    machine, notes = hosts.machine(asked)
    plan = plan_devices(asked, job(machine), machine)
    if hosts.most is not None:
        notes = (*notes, f"devices were lost: the run is planned anew for {plan.run.devices}")
    return RankPlan(plan, ("cpu" if hosts.kind == "CPU" else "cuda:0",) * plan.run.devices, machine, notes, hosts)


def refuse_engines_of_several_actors(run: Run, hosts: RayHosts | None) -> None:
    """A rank on a Ray cluster sees its own GPU alone, so its engine cannot span others."""
    if hosts is not None and hosts.kind != "CPU" and run.external and run.cut > 1:
        what = f"is {run.cut}, but a rank of run.cluster sees one GPU"
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, "Write 1, or leave run.cluster out.")])


def plan_over(asked: Run, device: torch.device, job: Callable[[Machine], Job]) -> RankPlan | None:
    """The plan of a job over the devices of this machine that may be used; None where it is for one."""
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    if asked.devices == 1 or (asked.devices == "auto" and not several):
        return None
    machine, chosen = machine_of_run(asked, device)
    plan = plan_devices(asked, job(machine), machine)
    count = plan.run.devices
    if count == 1:
        return None
    if chosen is None:
        return RankPlan(plan, ("cpu",) * count, machine)
    used = tuple(f"cuda:{each.index}" for each in chosen.devices[:count])
    return RankPlan(plan, used, machine, tuple(chosen.notes))


def assemble_ranks(
    planned: RankPlan,
    stage: Stage,
    ready: CheckedRun,
    stack: ExitStack,
    recoveries: Recoveries,
    checkpoint: Path | None,
    folder: Path,
    tell: OnWait,
) -> BuiltRun:
    """All of a run on ranks, as it began or as a checkpoint left it."""
    instead: Choice | None = None
    try:
        ranks, facts = _build(planned, stage, ready, stack, recoveries, checkpoint, folder, tell)
    except EngineError as error:
        if not gives_way(ready.config.run, planned.plan):
            raise
        instead = native_instead(planned.plan, error)
    if instead is not None:
        planned = _with_native(planned, ready, instead)
        ranks, facts = _build(planned, stage, ready, stack, recoveries, checkpoint, folder, tell)
    plan = planned.plan
    refuse_unequal_software([each.software for each in facts])
    if (models := stage.reward_models(ready)) is not None:
        models.use([RankedClassifier(ranks, number) for number in range(len(models.paths))])
    sampled = isinstance(ready.config, ResolvedConfig)
    rows, lowered = plan.run.rollout.max_sequences, [each.lowered for each in facts]
    tokens_per_step = plan.prefill_tokens_per_step if sampled else 0.0
    engine = Fleet(ranks, facts[0].engine, rows, lowered, plan.engine_devices, tokens_per_step, plan.joint_ranks)
    updaters = ranked_updaters(stage, plan, ranks, facts)
    if stage.rehearses:
        plan = calibrated_on(ranks, plan, ready.config.run, updaters.values(), engine)
    config: Any = with_plan(ready.config, plan.run) if sampled else with_offline_plan(ready.config, plan.run)
    automatic = is_automatic(ready.config.run, planned.plan)
    trainer = ranked_trainer(stage, ready, config, plan, ranks, facts, engine, recoveries, updaters, automatic)
    stack.callback(trainer.close)
    total = facts[0].policy.device_total_gib
    meter = RankMeter(ranks, None if total is None else int(total * 2**30))
    gpus = sorted({device for device in planned.devices if device != "cpu" and planned.hosts is None})
    return BuiltRun(config, plan, facts[0].policy, engine, trainer, meter, planned.notes, gpus, ranks)


def _build(
    planned: RankPlan,
    stage: Stage,
    ready: CheckedRun,
    stack: ExitStack,
    recoveries: Recoveries,
    checkpoint: Path | None,
    folder: Path,
    tell: OnWait,
) -> tuple[Ranks, list[RankFacts]]:
    """Ranks that have built their part; they end with `stack`."""
    ranks = start_ranks(planned, stage, ready, checkpoint, folder / RANK_LOGS, recoveries)
    stack.callback(ranks.close)
    tell(f"loading {checkpoint or ready.config.model.path} on {len(ranks)} ranks")
    return ranks, ranks.wait_until_built()


def _with_native(planned: RankPlan, ready: CheckedRun, why: Choice) -> RankPlan:
    """A plan for as many devices with the native engine, where the one that was planned did not start on some rank."""
    asked = ready.config.run.with_values({"engine": "native", "devices": len(planned.devices)})
    found = plan_ranks(ready, planned.hosts, asked)
    assert found is not None
    return replace(found, plan=replace(found.plan, choices=(*found.plan.choices, why)))


def start_ranks(
    planned: RankPlan,
    stage: Stage,
    ready: CheckedRun,
    checkpoint: Path | None,
    logs: Path,
    recoveries: Recoveries,
    channel: ChannelSetup | None = None,
    elsewhere: frozenset[str] = frozenset(),
    roles: tuple[str, ...] = (),
) -> Ranks:
    """Start a rank for each device. `channel`: where other ranks generate, how they are sent weights. `elsewhere`: roles that
    other ranks have. `roles`: of ranks that have only these, and not the policy's training."""
    plan, count, hosts = planned.plan, len(planned.devices), planned.hosts
    host = LOCALHOST if hosts is None else hosts.driver
    store = open_store(host)
    known = CheckedRun(ready.config, ready.device, ready.folder, ready.tokenizer, [], ready.lengths, ())
    models = stage.reward_models(ready)
    mine = "reward" not in elsewhere if not roles else "reward" in roles
    paths = tuple(models.paths) if models is not None and mine else ()
    prefix, backend = f"ranks-{os.getpid()}-{next(_sets)}", planned.backend
    make = partial(RoleSetup, roles=roles) if roles else RankSetup
    setups = [
        make(
            rank,
            count,
            store.port,
            prefix,
            backend,
            device,
            stage,
            known,
            plan,
            checkpoint,
            paths,
            planned.devices,
            host,
            channel,
            elsewhere,
        )
        for rank, device in enumerate(planned.devices)
    ]
    read = paths_of(ready.config, paths, checkpoint)
    module, name = ("trimtab.run.role_rank", roles[0]) if roles else ("trimtab.run.rank", "")
    ranks = open_ranks(module, planned, setups, logs, ready, read, recoveries, name)
    ranks.store = store  # it lives as long as they do
    return ranks


def calibrated_on(ranks: Ranks, plan: Plan, asked: Run, updaters: Iterable[RankedUpdater], engine: Fleet) -> Plan:
    """The plan after every rank has measured two micro-batches, as one device does. Not where passes need other ranks, or whole
    gradients have no room: a rank that ran short of memory would leave the others waiting."""
    if plan.run.shard not in ("none", "optimizer") or max(row_ranks(plan.run).values()) > 1:
        return plan
    return calibrated(plan, asked, updaters, engine, lambda job, run: worst(ranks.ask("calibrate", job, run)))


def ranked_updaters(
    stage: Stage, plan: Plan, ranks: Ranks, facts: Sequence[RankFacts | RoleFacts]
) -> dict[str, RankedUpdater]:
    shape = plan.job.shape
    cost = Cost(6.0 * shape.parameters, 12.0 * shape.hidden * shape.layers)
    full = plan.run.shard == "full"
    equal, sharing = full or plan.run.shard == "gradients", row_ranks(plan.run)
    names: list[Trained] = list(facts[0].updaters)  # type: ignore[arg-type]
    return {
        name: RankedUpdater(
            ranks, name, [each.updaters[name] for each in facts], stage.together, cost, equal, full, sharing
        )
        for name in names
    }


def recorder_variables(logs: Path) -> dict[str, str]:
    """Environment of ranks in which torch remembers the latest collectives (its flight recorder), and writes what it finds wrong
    itself beside the ranks' logs."""
    return {"TORCH_FR_BUFFER_SIZE": str(RECORDED_COLLECTIVES), "TORCH_FR_DUMP_TEMP_FILE": str(logs / "nccl-")}


def open_ranks(
    module: str,
    planned: RankPlan,
    setups: Sequence[Any],
    logs: Path,
    ready: CheckedRun,
    paths: Mapping[str, str],
    recoveries: Recoveries,
    name: str = "",
) -> Ranks:
    """Start a program for each device, wherever these are. `paths`: what the programs read there. `name`: of this set."""

    def tell(kind: str, text: str) -> None:
        (recoveries.restarted if kind == "restarted" else recoveries.of_engine)(text)

    plan, count, hosts = planned.plan, len(planned.devices), planned.hosts
    variables = {name: os.environ.get(name, value) for name, value in recorder_variables(logs).items()}
    variables |= {"OMP_NUM_THREADS": str(plan.run.threads)} | ({"GLOO_SOCKET_IFNAME": "lo"} if hosts is None else {})
    start: StartRank = start_here
    with ExitStack() as placed:
        if hosts is not None:
            placement = hosts.place(count)
            placed.callback(placement.close)
            placement.refuse_missing(dict(paths), ready.folder)
            start = placement.start
        on_end = placed.pop_all().close
    stall_s = STALL_STEPS * plan.times.total
    return Ranks(
        module,
        setups,
        logs,
        variables=[variables] * count,
        tell=tell,
        stall_s=stall_s,
        start=start,
        on_end=on_end,
        name=name,
    )


def ranked_trainer(
    stage: Stage,
    ready: CheckedRun,
    config: Any,
    plan: Plan,
    ranks: Ranks,
    facts: list[RankFacts],
    engine: Engine,
    recoveries: Recoveries,
    updaters: Mapping[str, RankedUpdater] | None = None,
    automatic: bool | None = None,
    beside: Sequence[RoleSet] = (),
) -> RankedTrainer:
    """`engine`: what shares the devices' memory with the update. `updaters`, and whether micro-batches are the planner's own
    choice: where these are known already. `beside`: ranks with other models."""
    updaters = ranked_updaters(stage, plan, ranks, facts) if updaters is None else updaters
    job, asked = plan.job, ready.config.run
    longest = job.longest_sequence if job.generates else job.longest_trained
    shorter = stage.shorter(config)
    guard = Guard(updaters["policy"], engine, least_kv_tokens=longest, shorter=shorter, report=recoveries.of_policy)
    critic = None
    if "critic" in updaters:
        critic = Guard(updaters["critic"], NoRollout(), least_kv_tokens=0, shorter=shorter, report=recoveries.of_critic)
    updates = config.learn.updates_per_batch if isinstance(config, ResolvedConfig) else 1
    automatic = is_automatic(asked, plan) if automatic is None else automatic
    governor = Governor(plan, automatic, asked.checkpoint_activations == "auto", updates)
    return RankedTrainer(ranks, guard, governor, critic, beside)
