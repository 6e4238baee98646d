"""A run in which some devices train and others generate (`run.placement: {actor: N, rollout: M}`): two sets of ranks, each with a
plan of its own.

The ranks that train are those of any run without a rollout. The others have an engine and a copy of the policy. With
`learn.staleness` both work at the same time.
"""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from trimtab.base.errors import ConfigError, Problem
from trimtab.cluster.mesh import LOCALHOST, open_store
from trimtab.cluster.ranks import Ranks
from trimtab.cluster.rewards import RankedClassifier
from trimtab.cluster.split_fleet import SplitFleet
from trimtab.cluster.transfer import ChannelSetup
from trimtab.config.load import AnyConfig
from trimtab.config.placement import groups_of_roles
from trimtab.config.ranks import nearest_divisor
from trimtab.config.resolved import ResolvedConfig, with_plan
from trimtab.config.run import Run
from trimtab.observe.rank_meter import RankMeter
from trimtab.observe.recoveries import Recoveries
from trimtab.plan.job import Machine
from trimtab.plan.refusal import plan_devices
from trimtab.plan.refuse_devices import refuse_unbuilt_placement
from trimtab.plan.roles import job_of_roles, machine_of, roles_of
from trimtab.plan.work import job_of
from trimtab.record.layout import RANK_LOGS
from trimtab.rollout.no_rollout import NoRollout
from trimtab.rollout.seat import EngineMeeting
from trimtab.run.assemble import BuiltRun
from trimtab.run.assemble_ranks import (
    RankPlan,
    open_ranks,
    ranked_trainer,
    refuse_engines_of_several_actors,
    start_ranks,
)
from trimtab.run.generating_rank import EngineFacts
from trimtab.run.machine import machine_of_run
from trimtab.run.rank import RankFacts
from trimtab.run.ray_hosts import RayHosts, paths_of
from trimtab.run.same_ranks import refuse_unequal_software
from trimtab.run.sampler_rank import SamplerSetup
from trimtab.run.shapes import shape_of, stated_models
from trimtab.run.stage import CheckedRun, OnWait, Stage

_channels = itertools.count()
"""Channels that this process has opened."""


@dataclass(frozen=True)
class SplitPlan:
    """A plan for each set of ranks."""

    trainers: RankPlan
    samplers: RankPlan

    @property
    def devices(self) -> tuple[str, ...]:
        return (*self.trainers.devices, *self.samplers.devices)


def split_sizes(config: AnyConfig) -> tuple[int, int] | None:
    """How many devices train and how many generate, where a config says that these are not the same."""
    asked = config.run.placement
    if asked in ("auto", "colocated") or not isinstance(config, ResolvedConfig):
        return None
    refuse_unbuilt_placement(config.run)
    assert not isinstance(asked, str)
    groups = groups_of_roles(asked)
    return int(asked["actor"]), groups[("rollout",)]


def plan_split(ready: CheckedRun, trainers: int, samplers: int, hosts: RayHosts | None = None) -> SplitPlan:
    """The plans for so many devices that train and so many that generate."""
    config, count = ready.config, trainers + samplers
    run = config.run.with_values({"devices": count})
    parts = run.cut
    if samplers % parts:
        what = f"is {parts}, but the {samplers} devices of rollout cannot be divided into engines of {parts}"
        fix = f"Write {nearest_divisor(parts, samplers)}, or another run.placement."
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, fix)])
    refuse_engines_of_several_actors(run, hosts)
    machine, notes, names = _devices(run, ready, count, hosts)
    shape = shape_of(config.model.path, config.model.trust_remote_code)
    models = stated_models(config, shape, machine.cpu, machine.device.tiled_head)
    whole = job_of(config, models, ready.lengths)

    def over(roles: tuple[str, ...], count: int, names: list[str]) -> RankPlan:
        pinned: dict[str, object] = {"devices": count, "placement": "auto"}
        if "actor" not in roles or count == 1:
            pinned |= {"shard": "auto", "shard_devices": "auto"}
        if "rollout" not in roles:
            pinned |= {"engine": "native", "rollout.tensor_parallel": 1}
        mine = machine_of(machine, count)
        plan = plan_devices(run.with_values(pinned), job_of_roles(whole, roles), mine)
        return RankPlan(plan, tuple(names[:count]), mine, notes, hosts)

    others = tuple(role for role in roles_of(whole) if role != "rollout")
    return SplitPlan(over(others, trainers, names), over(("rollout",), samplers, names[trainers:]))


def _devices(
    run: Run, ready: CheckedRun, count: int, hosts: RayHosts | None
) -> tuple[Machine, tuple[str, ...], list[str]]:
    """The machine, what to know of devices that are left out, and the devices as torch names them where they are."""
    if hosts is not None:
        if hosts.most is not None and hosts.most < count:
            what = f"needs {count} devices, and {hosts.most} are left"
            fix = "Write smaller numbers, or wait for the others with run.wait_for_hosts."
            raise ConfigError([Problem("run.placement", what, fix)])
        machine, notes = hosts.machine(hosts.asked(run))
        return machine, notes, ["cpu" if hosts.kind == "CPU" else "cuda:0"] * count
    machine, chosen = machine_of_run(run, ready.device)
    if chosen is None:
        return machine, (), ["cpu"] * count
    return machine, tuple(chosen.notes), [f"cuda:{each.index}" for each in chosen.devices]


def assemble_split(
    planned: SplitPlan,
    stage: Stage,
    ready: CheckedRun,
    stack: ExitStack,
    recoveries: Recoveries,
    checkpoint: Path | None,
    folder: Path,
    tell: OnWait,
) -> BuiltRun:
    """All of such a run, as it began or as a checkpoint left it."""
    learns, samples = planned.trainers, planned.samplers
    host = LOCALHOST if learns.hosts is None else learns.hosts.driver
    store = open_store(host)
    backend = "gloo" if "gloo" in (learns.backend, samples.backend) else "nccl"
    prefix = f"channel-{os.getpid()}-{next(_channels)}"
    by_unit = learns.plan.run.shard != "full"
    channel = ChannelSetup(store.port, prefix, 1 + len(samples.devices), backend, by_unit, host)
    trainers = start_ranks(learns, stage, ready, checkpoint, folder / RANK_LOGS, recoveries, channel)
    stack.callback(trainers.close)
    meeting = EngineMeeting(host, store.port, prefix, samples.backend)
    samplers = _start_samplers(samples, ready, checkpoint, folder, channel, meeting, recoveries)
    samplers.store = store
    stack.callback(samplers.close)
    tell(f"loading {checkpoint or ready.config.model.path} on {len(trainers)} + {len(samplers)} ranks")
    facts: list[RankFacts] = trainers.wait_until_built()
    refuse_unequal_software([each.software for each in facts])
    engines: list[EngineFacts] = samplers.wait_until_built()
    if (models := stage.reward_models(ready)) is not None:
        models.use([RankedClassifier(trainers, number) for number in range(len(models.paths))])
    rollout = samples.plan.run
    run = learns.plan.run.with_values(
        {
            "devices": len(planned.devices),
            "placement": {"actor": len(trainers), "rollout": len(samplers)},
            "rollout": rollout.rollout,
            "engine": rollout.engine,
        }
    )
    config = with_plan(ready.config, run)
    rows, lowered = rollout.rollout.max_sequences, [each.lowered for each in engines]
    engine = SplitFleet(
        samplers,
        trainers,
        engines[0].engine,
        rows,
        lowered,
        samples.plan.engine_devices,
        samples.plan.prefill_tokens_per_step,
        joint=samples.plan.joint_ranks,
    )
    trainer = ranked_trainer(stage, ready, config, learns.plan, trainers, facts, NoRollout(), recoveries)
    stack.callback(trainer.close)
    total = facts[0].policy.device_total_gib
    meter = RankMeter(trainers, None if total is None else int(total * 2**30))
    gpus = sorted({device for device in planned.devices if device != "cpu" and learns.hosts is None})
    return BuiltRun(config, learns.plan, facts[0].policy, engine, trainer, meter, learns.notes, gpus, trainers)


def _start_samplers(
    planned: RankPlan,
    ready: CheckedRun,
    checkpoint: Path | None,
    folder: Path,
    channel: ChannelSetup,
    meeting: EngineMeeting,
    recoveries: Recoveries,
) -> Ranks:
    setups = [
        SamplerSetup(
            rank=rank,
            ranks=len(planned.devices),
            device=device,
            config=ready.config,
            tokenizer=ready.tokenizer,
            plan=planned.plan,
            devices=planned.devices,
            checkpoint=checkpoint,
            folder=folder,
            channel=channel,
            meeting=meeting,
        )
        for rank, device in enumerate(planned.devices)
    ]
    logs, paths = folder / RANK_LOGS / "samplers", paths_of(ready.config, (), checkpoint)
    return open_ranks("trimtab.run.sampler_rank", planned, setups, logs, ready, paths, recoveries)
