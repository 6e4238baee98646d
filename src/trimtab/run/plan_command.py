"""What `trimtab plan` looks at: a config, and a machine that is here, in the catalogue, or described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.contradiction import REWARD_MODEL
from trimtab.config.load import AnyConfig, load_any
from trimtab.config.resolved import resolve_config
from trimtab.config.run import Run, parse_bytes
from trimtab.config.schema import Config
from trimtab.plan.arrange import Arranged, arrange
from trimtab.plan.devices import find_device, of_size
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import GIB
from trimtab.plan.placed_report import arranged_as_dict, refuse_split
from trimtab.plan.placement import SHARDS_BUILT
from trimtab.plan.planner import PROFILES, Plan
from trimtab.plan.reading import refuse_reading
from trimtab.plan.refusal import refuse, refuse_small_kv, refuse_what_engines_cannot
from trimtab.plan.refuse_devices import refuse_devices
from trimtab.plan.report import as_dict
from trimtab.plan.scenario import DEFAULT_STEPS, parse_quantiles, scenario_of, with_lengths
from trimtab.plan.simulate import Scenario, Simulated, simulate
from trimtab.plan.source import ASSUMED_EXAMPLE_TOKENS, stated_lengths
from trimtab.plan.work import job_of
from trimtab.run.completion_lengths import lengths_of
from trimtab.run.measured_times import measured_times
from trimtab.run.shapes import shape_of, stated_models

ASSUMED_HOST_BYTES = 256 * GIB
"""Host memory that a plan for another machine assumes without --host-memory."""


@dataclass(frozen=True)
class PlanOptions:
    """The command's options."""

    device: str | None = None
    devices: int | None = None
    devices_per_host: int | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    profile: str | None = None
    like: Path | None = None
    simulate: bool = False
    lengths: str | None = None
    times: Path | None = None
    steps: int = DEFAULT_STEPS
    seed: int = 0


@dataclass(frozen=True)
class PlanResult:
    """A plan, and what is to be said about it."""

    plan: Plan
    """Of the devices that train; of all, where they do everything."""
    config: AnyConfig
    profile: str
    notes: Sequence[str]
    arranged: Arranged
    simulated: tuple[Scenario, Simulated] | None = None

    def as_dict(self) -> dict[str, Any]:
        found = as_dict(self.plan) | arranged_as_dict(self.arranged)
        found |= {"profile": self.profile, "notes": list(self.notes), "fits": self.fits}
        if self.split:
            found |= {"devices": self.arranged.chosen.devices}
            found["step_seconds"] = self.arranged.chosen.times.as_dict() if self.fits else None
        if not self.fits:
            found["refusal"] = str(self.refusal())
        return found

    @property
    def fits(self) -> bool:
        return self.arranged.chosen.fits

    @property
    def split(self) -> bool:
        return self.arranged.chosen.kind == "split"

    def refusal(self) -> ConfigError:
        if self.split:
            return refuse_split(self.arranged.chosen)
        return refuse(self.plan, self.config.run, self.profile)


def look(file: Path, overrides: list[str], asked: PlanOptions) -> PlanResult:
    config = load_any(file, overrides)
    _refuse_simulation(asked, config)
    profile = _profile(asked.profile or config.run.profile)
    memory = _bytes("--device-memory", asked.device_memory)
    machine, notes = _machine(asked, memory, config.run)
    if memory is not None and not machine.cpu:
        config = config.with_values({"run.memory": memory})
    job = _job(config, file.absolute().parent, machine)
    if not isinstance(config, Config):
        if config.learn.max_tokens is None:
            notes.append(
                f"Assuming examples of up to {ASSUMED_EXAMPLE_TOKENS:,} tokens. Set learn.max_tokens, or start the run, which "
                "measures them."
            )
    elif config.data.max_prompt_tokens is None:
        notes.append(
            f"Assuming {job.longest_prompt}-token prompts. Set data.max_prompt_tokens, or run train, which measures them."
        )
    if asked.lengths is not None and job.generates:
        job, words = _with_lengths(job, asked.lengths)
        notes.append(f"Assuming completions {words}: {job.expected_completion:.0f} tokens on average.")
    elif asked.like is not None and job.generates:
        job = replace(job, lengths=lengths_of(asked.like, job.completion))
        notes.append(
            f"Assuming completions as long as in {asked.like}: {job.expected_completion:.0f} tokens on average."
        )
    if config.run.external and config.run.cut > 1 and machine.devices == 1:
        parts = config.run.cut
        notes.append(f"vLLM splits its copy of the model over {parts} devices; the plan shows the trainer's device.")
    if config.run.engine == "sglang" and machine.cpu:
        fix = "Write run.engine: native or vllm, or name a --device."
        raise ConfigError([Problem("run.engine", "SGLang needs a GPU, and the plan is for a CPU", fix)])
    if config.run.kernels in ("native", "liger") and machine.cpu:
        what = f"{config.run.kernels} kernels need a GPU, and the plan is for a CPU"
        raise ConfigError([Problem("run.kernels", what, "Write auto, or name a --device.")])
    refuse_devices(config.run, job, machine)
    refuse_reading(config.run, job, machine)
    refuse_small_kv(config.run, job, machine)
    refuse_what_engines_cannot(config.run, job, machine)
    arranged, filled = arrange(config.run, job, machine, profile), profile
    if asked.profile is None and profile != "max" and not arranged.chosen.fits:
        arranged, filled = arrange(config.run, job, machine, "max"), "max"
        notes.append(
            f"The run does not fit with run.profile: {profile}. This plan uses {filled} instead, as train would."
        )
    plan = arranged.chosen.trainer.plan
    simulated = None
    if asked.simulate and arranged.chosen.fits:
        measured = None if asked.times is None else measured_times(asked.times)
        scenario = scenario_of(arranged.chosen, asked.steps, asked.seed, measured)
        simulated = scenario, simulate(scenario)
    return PlanResult(plan, config, filled, [*notes, *_not_built(arranged)], arranged, simulated)


def _with_lengths(job: Job, lengths: str) -> tuple[Job, str]:
    """The job with lengths of a run folder, or of quantiles; and what they are, in words."""
    folder = Path(lengths).expanduser()
    if folder.is_dir():
        return with_lengths(job, lengths_of(folder, job.completion)), f"as long as in {folder}"
    return with_lengths(job, parse_quantiles(lengths)), f"of the lengths {lengths}"


def _refuse_simulation(asked: PlanOptions, config: AnyConfig) -> None:
    """Options of a simulation that there is none of."""
    if asked.simulate and not isinstance(config, Config):
        what = "this stage generates nothing, so there is nothing to simulate"
        raise ConfigError([Problem("--simulate", what, "Leave it out.")])
    if asked.times is not None and not asked.simulate:
        raise ConfigError([Problem("--times", "has no effect without --simulate", "Add --simulate, or leave it out.")])
    if asked.like is not None and asked.lengths is not None:
        raise ConfigError([Problem("--lengths", "says the same as --like", "Leave one of the two out.")])


def _not_built(arranged: Arranged) -> list[str]:
    """What a plan for another machine shows and a run of this version cannot do yet."""
    chosen, notes = arranged.chosen, []
    shard = chosen.trainer.plan.place.shard
    if shard not in SHARDS_BUILT:
        notes.append(f"This version cannot run run.shard: {shard} yet; the plan shows what it would take.")
    if not chosen.built:
        other = next((one for one in arranged.runners_up if one.built and one.staleness == chosen.staleness), None)
        instead = f" train would run {other.words()}: {other.times.total:.3g} s a step." if other else ""
        notes.append(
            f"This placement is only predicted: this version runs rollout with the actor, or alone on its devices.{instead}"
        )
    if chosen.devices > chosen.trainer.plan.machine.per_host:
        notes.append("Links between hosts are estimated at 50 GB/s for each device, of which 70 % are reached.")
    return notes


def _job(config: AnyConfig, folder: Path, machine: Machine) -> Job:
    """The work that a config asks for, as far as it says; its file is in this folder."""
    known = resolve_config(_found_models(config, folder)) if isinstance(config, Config) else config
    shape = shape_of(known.model.path, known.model.trust_remote_code)
    lengths = stated_lengths(known, shape)
    return job_of(known, stated_models(known, shape, machine.cpu, machine.device.tiled_head), lengths)


def _found_models(config: Config, folder: Path) -> Config:
    """The config with the paths of reward models that lie in its own folder, where training looks first."""
    parts = []
    for part in config.reward:
        here = folder / Path(part.fn.removeprefix(REWARD_MODEL)).expanduser()
        found = part.fn.startswith(REWARD_MODEL) and here.is_dir()
        parts.append(part.with_values({"fn": f"{REWARD_MODEL}{here}"}) if found else part)
    return config.with_values({"reward": parts})


def _profile(name: str) -> str:
    if name not in PROFILES:
        raise ConfigError([Problem("--profile", f"{name!r} is not a profile", f"Write one of {', '.join(PROFILES)}.")])
    return name


def _machine(asked: PlanOptions, memory: int | None, run: Run) -> tuple[Machine, list[str]]:
    """The machine that was asked for. `memory`: of each device. One that is not here has as many devices as the run asks for,
    where nobody says how many."""
    host = _bytes("--host-memory", asked.host_memory)
    cpu = (asked.device or "").lower() == "cpu" or (asked.device is None and memory is None and run.device == "cpu")
    if asked.device is None and memory is None and not cpu:
        return _here(asked.devices, host, run, per_host=asked.devices_per_host)
    if cpu:
        if asked.devices is not None or asked.devices_per_host is not None:
            fix = "Leave it out. To plan for several processes on a CPU, write run.devices=N."
            raise ConfigError([Problem("--devices", "a CPU counts as one device", fix)])
        return _here(None, host, run, cpu=True)
    device = of_size(memory or ASSUMED_HOST_BYTES) if asked.device is None else find_device(asked.device, memory)
    notes = [] if host else [f"Assuming {ASSUMED_HOST_BYTES // GIB} GiB of host memory. Set it with --host-memory."]
    pinned = sum(n for n in run.placement.values() if isinstance(n, int)) if isinstance(run.placement, dict) else 1
    devices = asked.devices or (pinned if run.devices == "auto" else run.devices)
    return Machine(device, devices, host or ASSUMED_HOST_BYTES, 16, per_host=asked.devices_per_host or 8), notes


def _here(
    devices: int | None, host: int | None, run: Run, cpu: bool = False, per_host: int | None = None
) -> tuple[Machine, list[str]]:
    """This machine, with so many of its GPUs, or with more than it has."""
    import torch

    from trimtab.run.machine import machine_of_run

    device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
    if device.type == "cpu" and devices is not None:
        raise ConfigError([Problem("--devices", "this machine has no GPU", "Name one with --device, such as h200.")])
    machine, chosen = machine_of_run(run if devices is None else run.with_values({"devices": "auto"}), device)
    notes = [] if chosen is None else [f"{note}." for note in chosen.notes]
    if machine.cpu and not cpu:
        notes.append("This machine has no GPU, so the plan is for its CPU. To plan for a GPU, add --device h200.")
    if devices is not None:
        machine = replace(machine.on(devices), per_host=per_host or max(machine.per_host, min(devices, 8)))
    return replace(machine, host_memory=host or machine.host_memory), notes


def _bytes(option: str, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        found = parse_bytes(value)
    except ValueError as error:
        raise ConfigError([Problem(option, str(error))]) from None
    if not isinstance(found, int) or found < GIB // 4:
        raise ConfigError([Problem(option, f"{value!r} is too little memory", "Write it with a unit, such as 40GiB.")])
    return found
