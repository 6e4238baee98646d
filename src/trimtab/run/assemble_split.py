"""A run whose roles are on different devices (`run.placement: {actor: N, critic: M, reference: actor, rollout: K}`): a set of
ranks for each group of roles, each with a plan of its own.

The ranks that train the policy are those of any run, without a rollout where others generate (sampler_rank.py) and without the
models that others have (role_rank.py). What different sets do is done at the same time where it can be: the update of the critic
beside that of the policy, scoring by one model beside scoring by another, with `learn.staleness` rollout beside both.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.cluster.fleet import Fleet
from trimtab.cluster.mesh import LOCALHOST, open_store
from trimtab.cluster.ranks import Ranks
from trimtab.cluster.rewards import RankedClassifier
from trimtab.cluster.split_fleet import SplitFleet
from trimtab.cluster.transfer import ChannelSetup
from trimtab.config.known import ResolvedRun
from trimtab.config.load import AnyConfig
from trimtab.config.placement import groups_of_roles
from trimtab.config.ranks import nearest_divisor
from trimtab.config.resolved import ResolvedConfig, with_plan
from trimtab.config.row_ranks import of_roles
from trimtab.config.run import Run
from trimtab.model.load import resolve_dtype
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
    on_one_device,
    open_ranks,
    ranked_trainer,
    refuse_engines_of_several_actors,
    start_ranks,
)
from trimtab.run.generating_rank import EngineFacts
from trimtab.run.machine import machine_of_run
from trimtab.run.rank import RankFacts
from trimtab.run.ray_hosts import RayHosts, paths_of
from trimtab.run.role_rank import RoleFacts
from trimtab.run.role_sets import role_set, start_role
from trimtab.run.same_ranks import refuse_unequal_software
from trimtab.run.sampler_rank import SamplerSetup
from trimtab.run.shapes import shape_of, stated_models
from trimtab.run.stage import CheckedRun, OnWait, Stage

_channels = itertools.count()
"""Channels that this process has opened."""


@dataclass(frozen=True)
class SplitPlan:
    """A plan for each set of ranks, by its roles; the set that trains the policy is the first."""

    sets: dict[tuple[str, ...], RankPlan]

    @property
    def trainers(self) -> RankPlan:
        return next(plan for roles, plan in self.sets.items() if "actor" in roles)

    @property
    def samplers(self) -> RankPlan | None:
        """Ranks that generate alone; None where those that train do."""
        return self.sets.get(("rollout",))

    @property
    def others(self) -> dict[tuple[str, ...], RankPlan]:
        """Ranks that do neither."""
        return {roles: plan for roles, plan in self.sets.items() if not {"actor", "rollout"} & {*roles}}

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for plan in self.sets.values() for device in plan.devices)


def split_sizes(config: AnyConfig) -> dict[tuple[str, ...], int] | None:
    """How many devices each group of roles has, where a config says that these are not the same."""
    asked = config.run.placement
    if asked in ("auto", "colocated") or not isinstance(config, ResolvedConfig):
        return None
    refuse_unbuilt_placement(config.run)
    assert not isinstance(asked, str)
    return groups_of_roles(asked)


def plan_split(ready: CheckedRun, sizes: Mapping[tuple[str, ...], int], hosts: RayHosts | None = None) -> SplitPlan:
    """The plans for groups of roles with so many devices each."""
    config, count = ready.config, sum(sizes.values())
    run = config.run.with_values({"devices": count})
    parts, samplers = run.cut, next(n for roles, n in sizes.items() if "rollout" in roles)
    if samplers % parts:
        what = f"is {parts}, but the {samplers} devices of rollout cannot be divided into engines of {parts}"
        fix = f"Write {nearest_divisor(parts, samplers)}, or another run.placement."
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, fix)])
    refuse_engines_of_several_actors(run, hosts)
    if hosts is None and resolve_dtype(config.model, ready.device) == torch.float16:
        on_one_device(config.run)
    machine, notes, names = _devices(run, ready, count, hosts)
    shape = shape_of(config.model.path, config.model.trust_remote_code)
    models = stated_models(config, shape, machine.cpu, machine.device.tiled_head)
    whole = job_of(config, models, ready.lengths)

    def over(roles: tuple[str, ...], count: int, names: list[str]) -> RankPlan:
        pinned: dict[str, object] = {"devices": count, "placement": "auto"}
        if "actor" not in roles or count == 1:
            pinned |= {"shard": "auto", "shard_devices": "auto"}
        if count == 1:
            pinned |= {"prefetch": "auto"}
        if "actor" not in roles:
            pinned |= {"sequence_parallel": of_roles(run, roles)}
        if "rollout" not in roles:
            pinned |= {"engine": "native", "rollout.tensor_parallel": 1}
        mine = machine_of(machine, count)
        plan = plan_devices(run.with_values(pinned), job_of_roles(whole, roles), mine)
        return RankPlan(plan, tuple(names[:count]), mine, notes, hosts)

    found, there = {}, roles_of(whole)
    for roles, each in sizes.items():
        mine = tuple(role for role in roles if role in there)
        found[mine], names = over(mine, each, names), names[each:]
    return SplitPlan(found)


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
    channel = None if samples is None else _channel_of(learns, samples, store.port, host)
    logs, elsewhere = folder / RANK_LOGS, frozenset(role for roles in planned.others for role in roles)
    trainers = start_ranks(learns, stage, ready, checkpoint, logs, recoveries, channel, elsewhere)
    stack.callback(lambda kept: trainers.close(), store)  # the channel's lives as long as the sender
    others: dict[tuple[str, ...], Ranks] = {}
    for roles, each in planned.others.items():
        others[roles] = start_role(each, roles, stage, ready, checkpoint, logs, recoveries)
        stack.callback(others[roles].close)
    samplers = None
    if samples is not None and channel is not None:
        samplers = _start_samplers(samples, ready, checkpoint, folder, channel, recoveries)
        stack.callback(samplers.close)
    counts = " + ".join(str(len(each)) for each in (trainers, *others.values(), samplers) if each is not None)
    tell(f"loading {checkpoint or ready.config.model.path} on {counts} ranks")
    facts: list[RankFacts] = trainers.wait_until_built()
    of_roles: dict[tuple[str, ...], list[RoleFacts]] = {r: each.wait_until_built() for r, each in others.items()}
    refuse_unequal_software(
        [each.software for each in facts] + [each.software for found in of_roles.values() for each in found]
    )
    if (models := stage.reward_models(ready)) is not None:
        scoring = next((ranks for roles, ranks in others.items() if "reward" in roles), trainers)
        models.use([RankedClassifier(scoring, number) for number in range(len(models.paths))])
    engine, rollout = _open_fleet(learns, trainers, facts, samples, samplers)
    asked = ready.config.run.placement
    run = learns.plan.run.with_values(
        {
            "devices": len(planned.devices),
            "placement": dict(asked),
            "rollout": rollout.rollout,
            "engine": rollout.engine,
        }
    )
    config = with_plan(ready.config, run)
    beside = [
        role_set(roles, others[roles], stage, planned.others[roles].plan, of_roles[roles], config, recoveries)
        for roles in others
    ]
    shares = NoRollout() if samples is not None else engine
    trainer = ranked_trainer(stage, ready, config, learns.plan, trainers, facts, shares, recoveries, beside=beside)
    stack.callback(trainer.close)
    total = facts[0].policy.device_total_gib
    meter = RankMeter(trainers, None if total is None else int(total * 2**30))
    gpus = sorted({device for device in planned.devices if device != "cpu" and learns.hosts is None})
    return BuiltRun(config, learns.plan, facts[0].policy, engine, trainer, meter, learns.notes, gpus, trainers)


def _channel_of(learns: RankPlan, samples: RankPlan, port: int, host: str) -> ChannelSetup:
    """Where weights go from those that train to those that generate."""
    backend = "gloo" if "gloo" in (learns.backend, samples.backend) else "nccl"
    prefix = f"channel-{os.getpid()}-{next(_channels)}"
    by_unit = learns.plan.run.shard != "full" and not samples.plan.joint_ranks  # slices are of single weights
    return ChannelSetup(port, prefix, 1 + len(samples.devices), backend, by_unit, host)


def _open_fleet(
    learns: RankPlan, trainers: Ranks, facts: list[RankFacts], samples: RankPlan | None, samplers: Ranks | None
) -> tuple[Fleet, ResolvedRun]:
    """The engines of all ranks that generate, once they are built, and how these run."""
    plan = (learns if samples is None else samples).plan
    rows, parts, tokens = plan.run.rollout.max_sequences, plan.engine_devices, plan.prefill_tokens_per_step
    if samplers is None:
        lowered = [each.lowered for each in facts]
        return Fleet(trainers, facts[0].engine, rows, lowered, parts, tokens, plan.joint_ranks), plan.run
    engines: list[EngineFacts] = samplers.wait_until_built()
    lowered = [each.lowered for each in engines]
    joint = plan.joint_ranks
    return SplitFleet(samplers, trainers, engines[0].engine, rows, lowered, parts, tokens, joint), plan.run


def _start_samplers(
    planned: RankPlan,
    ready: CheckedRun,
    checkpoint: Path | None,
    folder: Path,
    channel: ChannelSetup,
    recoveries: Recoveries,
) -> Ranks:
    meeting = EngineMeeting(channel.store_host, channel.store_port, channel.prefix, planned.backend)
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
    return open_ranks("trimtab.run.sampler_rank", planned, setups, logs, ready, paths, recoveries, "rollout")
