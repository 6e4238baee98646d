"""What a run would take with other settings or on another machine: the planner, without torch, without writing anything.

Keys that Trimtab had chosen for the run are open again, unless they are given. Memory and seconds are what `trimtab plan` says
for the same config and machine; beside them, seconds of each phase are scaled by what this run measured over what a plan says
of it, so that the run's own settings give the run's own times. What does not fit says what binds, and which single changes
would help."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.base.errors import ModelError, TrimtabError
from trimtab.base.units import GIB
from trimtab.config.load import AnyConfig, load_any
from trimtab.config.resolved import resolve_config
from trimtab.config.schema import Config
from trimtab.observe.web.server.question import Question, bytes_of
from trimtab.plan.devices import find_device, nearest, of_size
from trimtab.plan.job import Job, Machine
from trimtab.plan.place import place_over
from trimtab.plan.planner import Plan
from trimtab.plan.refusal import changes_that_fit, refuse, refuse_small_kv, refuse_what_engines_cannot, widest
from trimtab.plan.refuse_devices import refuse_devices
from trimtab.plan.report import as_dict
from trimtab.plan.shape import ModelShape
from trimtab.plan.source import described_shape, stated_lengths
from trimtab.plan.stated import models_of
from trimtab.plan.times import PHASES
from trimtab.plan.work import job_of
from trimtab.record.columns import TRAINED
from trimtab.record.layout import CONFIG, PLAN
from trimtab.record.reader import RunReader

RECENT_STEPS = 20
ASSUMED_HOST_BYTES, ASSUMED_CORES = 256 * GIB, 16
"""What a plan for another machine assumes, as `trimtab plan` does."""


@dataclass(frozen=True)
class Measured:
    """Median seconds of the run's last steps."""

    planned: Mapping[str, float] = field(default_factory=dict)
    """Of phases that a plan has, too."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Of all other phases: no plan says how long they take, so they are as they were."""
    steps: int = 0


Scales = tuple[Measured, dict[str, float]]
"""What a run measured, and by phase how that compares with a plan."""


def explore(run: Path, asked: Question, scales: Scales | None = None) -> dict[str, Any]:
    """A plan for the question, in the run's own seconds too. `scales`: what `scales_of` says, for who asks more than once."""
    held = _json(run / PLAN)
    freed = tuple(f"{choice['key']}=auto" for choice in held.get("choices", ()) if isinstance(choice.get("key"), str))
    config, machine, notes = _asked(run, held, asked, freed)
    plan, profile = _plan(config, machine, asked.profile)
    found = as_dict(plan) | {"profile": profile, "overrides": list(asked.overrides), "notes": notes, "measured": None}
    own = _own_machine(held, config)
    if (machine.cpu, machine.device.name) != (own.cpu, own.device.name):
        notes.append("Seconds are the planner's own: this run was measured on another device.")
    elif plan.fits:
        found["measured"] = _scaled(plan, *(scales or scales_of(run)))
    if not plan.fits:
        found |= _what_binds(plan, config, profile)
    return found


def _asked(
    run: Path, held: Mapping[str, Any], asked: Question, freed: Sequence[str]
) -> tuple[AnyConfig, Machine, list[str]]:
    notes: list[str] = []
    config = load_any(run / CONFIG, [*freed, *asked.overrides])
    memory, host = bytes_of("device_memory", asked.device_memory), bytes_of("host_memory", asked.host_memory)
    if asked.device is None and memory is None:
        machine = _own_machine(held, config)
        machine = machine if asked.devices is None else machine.on(asked.devices)
    elif (asked.device or "").lower() == "cpu":
        machine = _cpu(host or int(held.get("host_memory") or ASSUMED_HOST_BYTES), config)
    else:
        device = of_size(memory or ASSUMED_HOST_BYTES) if asked.device is None else find_device(asked.device, memory)
        devices = asked.devices or (1 if config.run.devices == "auto" else config.run.devices)
        machine = Machine(device, devices, host or ASSUMED_HOST_BYTES, ASSUMED_CORES)
        if host is None:
            notes.append(f"Assuming {ASSUMED_HOST_BYTES // GIB} GiB of host memory.")
    if memory is not None and not machine.cpu:
        config = config.with_values({"run.memory": memory})
    return config, machine, notes


def _own_machine(held: Mapping[str, Any], config: AnyConfig) -> Machine:
    """The machine that the run was planned for, as plan.json describes it."""
    host = int(held.get("host_memory") or ASSUMED_HOST_BYTES)
    memory = int(held.get("device_memory") or 0)
    if not held or held.get("device") == "cpu" or not memory:
        return _cpu(host, config)
    device, devices = nearest(str(held.get("device")), memory), int(held.get("devices") or 1)
    return Machine(device, devices, host, ASSUMED_CORES, per_host=max(8, devices))


def _cpu(host: int, config: AnyConfig) -> Machine:
    threads = config.run.threads
    return Machine(nearest("CPU", host), 1, host, threads if isinstance(threads, int) else ASSUMED_CORES, cpu=True)


def _plan(config: AnyConfig, machine: Machine, profile: str | None) -> tuple[Plan, str]:
    job = _job(config, machine)
    refuse_devices(config.run, job, machine)
    refuse_small_kv(config.run, job, machine)
    refuse_what_engines_cannot(config.run, job, machine)
    if profile is not None:
        return place_over(config.run, job, machine, profile), profile
    return widest(config.run, job, machine, config.run.profile)


def _job(config: AnyConfig, machine: Machine) -> Job:
    known = resolve_config(config) if isinstance(config, Config) else config
    shape = described(known.model.path)
    models = models_of(known, shape, lambda path, _: described(path), machine.cpu, machine.device.tiled_head)
    return job_of(known, models, stated_lengths(known, shape))


def described(path: str) -> ModelShape:
    """A model's shape by its config.json: in a folder, or in the hub's cache on this machine. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    from trimtab.base.suggestions import is_local
    from trimtab.plan.source import WELL_KNOWN

    if not is_local(path) and path.split("/")[-1].lower() not in WELL_KNOWN:
        cached = try_to_load_from_cache(path, "config.json") if path.count("/") == 1 else None
        path = str(Path(cached).parent) if isinstance(cached, str) else path
    shape = described_shape(path)
    if shape is None:
        raise ModelError(
            f"{path} has to be built to know what it takes, and this server has no torch. Use `trimtab plan`"
        )
    return shape


def scales_of(run: Path, reader: RunReader | None = None) -> Scales:
    """What the run measured, and how that compares with a plan for its own settings, phase by phase. `reader`: one that has read
    the run already."""
    held = _json(run / PLAN)
    measured = measure(run, reader)
    try:
        config = load_any(run / CONFIG)
        planned = _plan(config, _own_machine(held, config), None)[0].times.as_dict()
    except TrimtabError:
        planned = held.get("step_seconds") or {}
    ratios = {
        name: seconds / planned[name]
        for name, seconds in measured.planned.items()
        if seconds > 0 and isinstance(planned.get(name), int | float) and planned[name] > 0
    }
    return measured, ratios


def measure(run: Path, reader: RunReader | None = None) -> Measured:
    if reader is None:
        reader = RunReader(run)
        reader.update()
    trained = reader.metrics.written(TRAINED) & (reader.metrics.steps > 0)
    last = np.flatnonzero(trained)[-RECENT_STEPS:]
    found = {}
    for name in reader.metrics.names:
        phase = name.removeprefix("time/")
        if name == f"time/{phase}" and phase not in ("total", "at", "communication", "observe"):
            values = reader.metrics.column(name)[last]
            values = values[np.isfinite(values)]
            found[phase] = float(np.median(values)) if len(values) else 0.0
    planned = {name: seconds for name, seconds in found.items() if name in PHASES}
    return Measured(planned, {name: s for name, s in found.items() if name not in PHASES and s > 0}, len(last))


def _scaled(plan: Plan, measured: Measured, ratios: Mapping[str, float]) -> dict[str, Any] | None:
    """The plan's seconds as this run would take them; None where the run has no steps to compare with."""
    if not measured.steps:
        return None
    seconds = {name: value for name, value in plan.times.as_dict().items() if name != "total"}
    phases = {name: value * ratios.get(name, 1.0) for name, value in seconds.items()}
    total = sum(phases.values()) + sum(measured.others.values())
    words = (
        f"seconds of a plan, times what the run's last {measured.steps} steps measured over what a plan says of them"
    )
    return {"phases": phases, "others": dict(measured.others), "total": total, "ratios": dict(ratios), "note": words}


def _what_binds(plan: Plan, config: AnyConfig, profile: str) -> dict[str, Any]:
    changes = changes_that_fit(plan.job, plan.machine, config.run, profile)
    host, device = plan.ledger.fullest_host, plan.ledger.fullest
    on_host = plan.machine.cpu or host.host_bytes - plan.limits.host > device.required_bytes - plan.limits.device
    phase, parts = (host, host.host) if on_host else (device, device.device)
    largest = max(parts, key=lambda name: parts[name])
    where = "host memory" if on_host else "the device"
    return {
        "binds": f"{phase.name}, on {where}: {largest}, {parts[largest] / GIB:.1f} GiB",
        "refusal": str(refuse(plan, config.run, profile, changes)),
        "missing_bytes": plan.missing_bytes,
        "changes": [{"text": text, "saves_bytes": saved} for text, saved in changes],
    }


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
