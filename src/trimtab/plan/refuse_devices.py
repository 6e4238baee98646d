"""Devices and shards that a run asks for and cannot have: one clear error, before any weight is loaded.

What a config alone contradicts is in config/ranks.py; here are the machine and the model.
"""

from __future__ import annotations

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.placement import groups_of_roles
from trimtab.config.ranks import nearest_divisor
from trimtab.config.row_ranks import row_ranks
from trimtab.config.run import Run
from trimtab.model.sizes import BLOCK
from trimtab.plan.job import Job, Machine
from trimtab.plan.placement import SHARDS_BUILT, device_counts, may_share_rows, unblocked_row

MAX_RANKS_PER_CORE = 4
"""Processes that a CPU is asked to run for each of its cores: with more, they only wait for each other."""


def refuse_devices(run: Run, job: Job, machine: Machine) -> None:
    """Raises where this machine, or this model, has no such placement."""
    refuse_missing_devices(run, machine)
    _refuse_placement(run, machine)
    most = run.devices if run.devices != "auto" else 1 if machine.cpu else machine.devices
    if run.shard not in ("auto", "none") and most == 1:
        where = "a CPU counts as one device" if machine.cpu else f"{_this(machine)} has one GPU"
        what = f"{run.shard} has no effect on one device, and {where}"
        raise ConfigError([Problem("run.shard", what, "Leave it out, or set run.devices.")])
    if most == 1:
        _refuse_parts_of_one_device(run)
    if run.shard_devices != "auto" and not device_counts(run, machine):
        what = f"{run.shard_devices} ranks hold one set of parts, but there are only {most} devices"
        raise ConfigError([Problem("run.shard_devices", what, "Write a divisor of the number of devices, or auto.")])
    shared = max(row_ranks(run).values())
    if shared > 1 and not device_counts(run, machine):
        what = f"{shared} devices share each micro-batch, but there are only {most}"
        raise ConfigError([Problem("run.sequence_parallel", what, f"Write {nearest_divisor(shared, most)}, or auto.")])
    if shared > 1 and not may_share_rows(job):
        what = f"layers of {job.shape.kind} carry a state from token to token, which devices that share a sequence cannot hand on"
        raise ConfigError([Problem("run.sequence_parallel", what, "Write 1, or leave it out.")])
    refuse_engine_across_hosts(run, machine)
    if job.generates:
        refuse_cut_over_missing(run, most)
    row = unblocked_row(job) if run.shard == "full" else None
    if row is not None:
        name, size = row
        what = (
            f"full cuts matrices between rows, and 8-bit optimizer states need rows of a multiple of {BLOCK} elements; those of "
            f"{name} have {size}"
        )
        raise ConfigError([Problem("run.shard", what, "Write gradients, or learn.optimizer.states: full.")])
    if machine.here and run.shard not in ("auto", *SHARDS_BUILT):
        what = f"this version cannot run {run.shard} yet; `trimtab plan --device NAME --devices N` shows what it would take"
        raise ConfigError([Problem("run.shard", what, f"Write {', '.join(SHARDS_BUILT[:-1])} or {SHARDS_BUILT[-1]}.")])


def refuse_cut_over_missing(run: Run, most: int) -> None:
    """Raises where a native engine is cut over more devices than there are: each has a rank."""
    if not run.external and run.cut > most:
        have = "1 device" if most == 1 else f"{most} devices"
        what = f"is {run.cut}, but the run has {have}, and a native engine is cut over the run's own devices"
        fix = f"Write run.devices: {run.cut}, or tensor_parallel: {most}."
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, fix)])


def _refuse_parts_of_one_device(run: Run) -> None:
    """Raises where a run says how devices share a model, and there is one."""
    for key, value in (("shard_devices", run.shard_devices), ("prefetch", run.prefetch)):
        if value not in ("auto", 1):  # 1 is what a plan writes
            what = f"is {value}, which has no effect on one device"
            raise ConfigError([Problem(f"run.{key}", what, "Leave it out, or set run.devices.")])


def refuse_engine_across_hosts(run: Run, machine: Machine) -> None:
    """Raises where an engine that is cut over devices would not stay on one host: its parts exchange something in every layer."""
    parts, host = run.cut, machine.per_host
    several = machine.hosts > 1 and not machine.cpu
    if several and host % parts:
        what = f"is {parts}, but a host has {host} devices, which cannot be divided into engines of {parts}"
        fix = f"Write {nearest_divisor(parts, host)}."
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, fix)])


def refuse_missing_devices(run: Run, machine: Machine) -> None:
    """Raises where a run asks for more devices than there are."""
    if run.devices == "auto":
        return
    if machine.cpu:
        most = MAX_RANKS_PER_CORE * machine.cores
        if run.devices > most:
            cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
            what = f"is {run.devices}, but this machine has {cores}: at most {MAX_RANKS_PER_CORE} processes each"
            raise ConfigError([Problem("run.devices", what, f"Write {most} or less.")])
    elif run.devices > machine.devices:
        gpus = "1 GPU" if machine.devices == 1 else f"{machine.devices} GPUs"
        what = f"is {run.devices}, but {_this(machine)} has {gpus}"
        raise ConfigError([Problem("run.devices", what, f"Write {machine.devices} or less, or auto.")])


def refuse_unbuilt_placement(run: Run) -> None:
    """Raises where a run asks for a placement that this version can only predict."""
    placement = run.placement
    if placement in ("auto", "colocated"):
        return
    if isinstance(placement, str):
        what = "does not say how many devices generate"
        fix = "Write numbers, such as {actor: 4, rollout: 4}; `trimtab plan --devices N` compares them."
        raise ConfigError([Problem("run.placement", what, fix)])
    groups = groups_of_roles(placement)
    if len(groups) == 1:
        (count,) = groups.values()
        what = "puts all roles on the same devices"
        raise ConfigError([Problem("run.placement", what, f"Write run.devices: {count} instead.")])
    generates = placement.get("rollout", "actor")
    if isinstance(generates, str) and generates != "actor":
        what = f"puts rollout on the devices of {generates}, which cannot generate"
        raise ConfigError([Problem("run.placement", what, "Write rollout: actor, or a number of devices for it.")])
    guests = [role for role, place in placement.items() if place == "rollout"] if generates != "actor" else []
    if guests:
        what = f"puts {guests[0]} on the devices of rollout, which only generate"
        fix = f"Write {guests[0]}: actor, or a number of devices for it."
        raise ConfigError([Problem("run.placement", what, fix)])


def _refuse_placement(run: Run, machine: Machine) -> None:
    """A placement that this version cannot run here, or that the machine has too few devices for."""
    if run.placement in ("auto", "colocated"):
        return
    if machine.here:
        refuse_unbuilt_placement(run)
    need = sum(n for n in run.placement.values() if isinstance(n, int)) if isinstance(run.placement, dict) else 2
    if need > machine.devices:
        have = f"{machine.devices} device{'s' * (machine.devices > 1)}"
        what = f"needs {need} devices, but {_this(machine)} has {have}"
        fix = f"Plan for --devices {need}, or write a smaller placement."
        raise ConfigError([Problem("run.placement", what, fix)])


def _this(machine: Machine) -> str:
    return "this machine" if machine.here else "the planned machine"
