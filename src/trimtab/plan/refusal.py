"""Where nothing fits: why, and the smallest single changes that would fit, first to `run`, then to `learn` by what they save,
then to the machine. Trimtab makes none of them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.run import Run, Shard
from trimtab.plan.cache import applied, recall
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import least_kv_bytes
from trimtab.plan.ledger import GIB, MIB, processes_of
from trimtab.plan.place import place_over
from trimtab.plan.placement import SHARDS, SHARDS_BUILT, Placement
from trimtab.plan.planner import Choice, Plan, within
from trimtab.plan.reading import refuse_reading
from trimtab.plan.refuse_devices import refuse_devices
from trimtab.plan.rules import page_tokens, workers_for
from trimtab.plan.shape import Block, ModelShape
from trimtab.plan.states import state_bytes
from trimtab.rollout.external.kinds import VLLM_RANKS


def widest(run: Run, job: Job, machine: Machine, profile: str) -> tuple[Plan, str]:
    """The plan under a profile or, if it needs more than that allows, under `max`; and under which."""
    plan = place_over(run, job, machine, profile)
    return (plan, profile) if plan.fits or profile == "max" else (place_over(run, job, machine, "max"), "max")


def plan_here(run: Run, job: Job, machine: Machine) -> Plan:
    """The plan of a run that is about to start; raises where nothing fits."""
    refuse_devices(run, job, machine)
    refuse_reading(run, job, machine)
    refuse_small_kv(run, job, machine)
    refuse_what_engines_cannot(run, job, machine)
    plan, profile = widest(run, job, machine, run.profile)
    # Host memory can be swapped, and what others hold there comes and goes; a limit that was set is one.
    if not plan.fits and (not machine.cpu or run.memory is not None):
        raise refuse(plan, run, profile)
    return plan


def plan_devices(run: Run, job: Job, machine: Machine) -> Plan:
    """The plan of a run over the devices of this machine, before any rank is started: as many as make a step fastest, or as many
    as it asks for. `machine` has all that are free (run/machine.py:machine_of_run); the plan's has those that are used."""
    refuse_devices(run, job, machine)
    return planned(run, job, machine)


def planned(run: Run, job: Job, machine: Machine) -> Plan:
    """A plan with what `trimtab tune` has found for this job on such a machine, where that fits."""
    found = recall(job, machine, run)
    if found is None:
        return plan_here(run, job, machine)
    tuned, values = applied(run, found)
    plan = place_over(tuned, job, machine, run.profile)
    if not plan.fits:
        return plan_here(run, job, machine)
    why = f"measured by trimtab tune on {found['when']}"
    return replace(
        plan, choices=(*plan.choices, *(Choice(key, value, why, measured=True) for key, value in values.items()))
    )


def refuse_small_kv(run: Run, job: Job, machine: Machine) -> None:
    pinned = run.rollout.kv_memory
    processes = processes_of(run)
    need = least_kv_bytes(job, run, processes, page_tokens(run, job, machine)[0])
    if not job.generates:
        return
    if pinned != "auto" and pinned < need:
        each = f" in each of {processes} processes" if processes > 1 else ""
        what = f"{pinned:,} bytes cannot hold one sequence of {job.longest_sequence} tokens{each}; that takes {need:,}"
        fix = f"Write at least {-(-need // 1024)}KiB or auto, or lower learn.max_new_tokens."
        raise ConfigError([Problem("run.rollout.kv_memory", what, fix)])


def refuse_what_engines_cannot(run: Run, job: Job, machine: Machine) -> None:
    """What another library's engine would fail at after it was started."""
    if job.generates and run.cut > 1:
        _refuse_cut(run, job)
        refuse_uneven_cut(run, job.shape)
    if not (job.generates and run.external):
        return
    if run.engine == "vllm" and job.rank > VLLM_RANKS[-1]:
        what = f"vLLM serves adapters up to rank {VLLM_RANKS[-1]}, not {job.rank}"
        raise ConfigError([Problem("model.lora.r", what, "Lower it, or write run.engine: native.")])
    if run.engine == "vllm" and job.rank and job.itemsize > 2 and not machine.cpu:
        what = "on a GPU vLLM computes adapters only in half precision"
        raise ConfigError([Problem("model.dtype", what, "Write bfloat16, or run.engine: native.")])
    if run.engine == "vllm" and job.itemsize == 2 and not machine.cpu and not machine.device.bfloat16:
        what = f"vLLM does not compute in bfloat16 on a {machine.device.name}"
        raise ConfigError([Problem("model.dtype", what, "Write float32, or run.engine: native.")])
    page, whole = run.rollout.page_tokens, 32 if machine.cpu else 16
    if run.engine == "vllm" and page != "auto" and page % whole:
        fix = f"Write {max(1, round(page / whole)) * whole}, or leave it out."
        raise ConfigError(
            [Problem("run.rollout.page_tokens", f"vLLM needs a multiple of {whole} tokens, not {page}", fix)]
        )


def _refuse_cut(run: Run, job: Job) -> None:
    """What the native engine does not cut over devices."""
    if run.external:
        return
    if job.shape.has_experts:
        what = f"is {run.cut}, but the native engine does not cut experts over devices"
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, "Write 1, or run.engine: vllm.")])
    if any(block.latent for block in job.shape.kinds):
        what = f"is {run.cut}, but the native engine does not cut latent attention over devices"
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, "Write 1, or run.engine: vllm.")])
    if job.quantised:
        what = f"is {run.cut}, but the native engine does not cut weights in {job.base} codes over devices"
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, "Write 1, or model.base: bf16.")])


def refuse_uneven_cut(run: Run, shape: ModelShape) -> None:
    """Engines cut layers into equal parts; where there are fewer KV heads than devices, several devices hold the same head."""

    def uneven(parts: int) -> list[Block]:
        return [
            block for block in shape.kinds
            if block.heads % parts or block.width % parts or (block.kv_heads % parts and parts % block.kv_heads)
        ]  # fmt: skip

    asked, devices = run.cut, 0 if run.devices in ("auto", 1) else run.devices
    if uneven(asked):
        block = uneven(asked)[0]
        most = max(parts for parts in range(1, asked) if not uneven(parts) and devices % parts == 0)
        who = "vLLM" if run.external else "the native engine"
        what = (
            f"{who} cannot split {block.heads} heads, {block.kv_heads} KV heads and {block.width} feed-forward columns evenly "
            f"over {asked} devices"
        )
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, f"Write {most}.")])


def refuse(plan: Plan, run: Run, profile: str, changes: list[tuple[str, int]] | None = None) -> ConfigError:
    """Why nothing fits, and the first few of the changes that would. `changes`: of `changes_that_fit`, if known."""
    job, machine = plan.job, plan.machine
    changes = changes_that_fit(job, machine, run, profile) if changes is None else changes
    host, device = plan.ledger.fullest_host, plan.ledger.fullest
    on_host = machine.cpu or host.host_bytes - plan.limits.host > device.required_bytes - plan.limits.device
    fullest, parts = (host, host.host) if on_host else (device, device.device)
    have = plan.limits.host if on_host else plan.limits.device
    largest = max(parts, key=lambda name: parts[name])
    need, where = fullest.host_bytes if on_host else fullest.required_bytes, " of host memory" if on_host else ""
    what = (
        f"{fullest.name} does not fit, even with all automatic settings at their minimum: it needs {need / GIB:.1f} GiB{where}, "
        f"and the limit is {have / GIB:.1f} GiB ({limit_words(plan, run, profile, on_host)}). Bottleneck: {largest}, "
        f"{parts[largest] / GIB:.1f} GiB"
    )
    fixes = [words for words, _ in changes]
    fix = "Any one of these changes would fit: " + "; ".join(fixes[:4]) if fixes else "No single change helps"
    return ConfigError([Problem("run", what, fix + ".")])


def limit_words(plan: Plan, run: Run, profile: str, on_host: bool) -> str:
    """What the limit of a plan is a share of, and why of that."""
    machine = plan.machine
    have = machine.host_memory if on_host else machine.device.memory
    limit = plan.limits.host if on_host else plan.limits.device
    words = f"{limit / have:.0%} of {have / GIB:.1f} GiB".replace("%", " %")
    if on_host and not machine.cpu:
        return words
    words += ", which is run.memory" if run.memory is not None and run.memory - MIB <= have else ""
    return f"{words}; run.profile {profile}"


def changes_that_fit(job: Job, machine: Machine, run: Run, profile: str) -> list[tuple[str, int]]:
    """Single changes with which the job fits, in the order they should be tried, with the bytes each saves."""
    found: list[tuple[str, int]] = []
    now = place_over(run, job, machine, profile)

    def attempt(words: str, run: Run, job: Job, machine: Machine = machine) -> bool:
        plan = place_over(run, job, machine, profile)
        if plan.fits:
            found.append((words, now.ledger.fullest.device_bytes - plan.ledger.fullest.device_bytes))
        return plan.fits

    def first(changes: Iterable[tuple[str, Run, Job, Machine]]) -> None:
        """Notes the first change with which it fits; changes come smallest first."""
        any(attempt(*change) for change in changes)

    sizes = ("token_budget", "score_token_budget", "logprob_chunk", "checkpoint_activations")
    _try_shards(attempt, job, machine, run)
    for key in sizes:
        if getattr(run, key) != "auto":
            attempt(f"leave run.{key} to auto", run.with_values({key: "auto"}), job)
    for name in ("rollout", "offload"):
        section = getattr(run, name)
        for key, field in type(section).model_fields.items():
            if field.default == "auto" and getattr(section, key) != "auto":
                attempt(f"leave run.{name}.{key} to auto", run.with_values({f"{name}.{key}": "auto"}), job)
    unpinned = Run(device=run.device, devices=run.devices, profile=run.profile, memory=run.memory)
    if run != unpinned:
        attempt("leave all of run to auto", unpinned, job)
    workers = run.reward_workers if run.reward_workers != "auto" else workers_for(machine.cores)
    if job.generates and workers > 1:  # they run before there is a plan
        attempt("run.reward_workers: 1", run.with_values({"reward_workers": 1}), job)
    if run.kernels == "auto" and not machine.cpu and not job.liger:
        liger = replace(job, fused=False, liger=True)
        attempt("run.kernels: liger", run.with_values({"kernels": "liger"}), liger)
    if found:
        return found
    if not job.rank:
        attempt("model.lora: {r: 16}", run, with_adapters(job, 16))
    if not job.eight_bit:
        attempt("learn.optimizer.states: 8bit", run, replace(job, eight_bit=True))
    if job.reference:
        attempt("learn.kl.coef: 0, which needs no reference policy", run, replace(job, reference=False, compared=False))
    halves = [replace(job, completion=max(1, job.completion // share)) for share in (2, 4, 8)]
    key, more = ("learn.max_new_tokens", 0) if job.generates else ("learn.max_tokens", 1)
    first((f"{key}: {shorter.completion + more}", run, shorter, machine) for shorter in halves)
    found.sort(key=lambda change: -change[1])
    _try_machines(first, job, machine, run)
    return found


def _try_shards(attempt: Callable[[str, Run, Job], bool], job: Job, machine: Machine, run: Run) -> None:
    """Another way to hold states than the one that is pinned: the simplest with which it fits."""
    modes = SHARDS_BUILT if machine.here else SHARDS
    for mode in modes[modes.index(run.shard) + 1 :] if run.shard in modes and machine.devices > 1 else ():
        saved = _saved_by(mode, run, job, machine)
        if attempt(f"run.shard: {mode}{saved}", run.with_values({"shard": mode, "shard_devices": "auto"}), job):
            return
    if run.shard_devices not in ("auto", 1):
        attempt("leave run.shard_devices to auto", run.with_values({"shard_devices": "auto"}), job)


def _saved_by(mode: Shard, run: Run, job: Job, machine: Machine) -> str:
    """What a mode saves of a rank's weights, gradients and optimizer state, in words."""
    group = machine.ranks_per_host

    def held(shard: Shard, parts: int) -> int:
        place = Placement(machine.devices, machine.hosts, shard, parts)
        return state_bytes(job, place)

    before = held(run.shard, group if run.shard_devices == "auto" else run.shard_devices) if run.shard != "auto" else 0
    saved = before - held(mode, group)
    return f", which saves {saved / GIB:.1f} GiB on each device" if saved > 0 else ""


def _try_machines(
    first: Callable[[Iterable[tuple[str, Run, Job, Machine]]], None], job: Job, machine: Machine, run: Run
) -> None:
    """More memory, and more devices."""
    machine = within(machine, run)
    limited, unlimited = run.memory is not None, run.with_values({"memory": None})
    on_device = "run.memory: {}GiB" if limited else "a device with {} GiB"
    on_host = "run.memory: {}GiB" if limited and machine.cpu else "{} GiB of host memory"
    sizes = [] if machine.cpu else [gib for gib in (24, 32, 40, 48, 80, 141, 192) if gib * GIB > machine.device.memory]
    first((on_device.format(gib), unlimited, job, with_memory(machine, gib * GIB)) for gib in sizes)
    hosts = [gib for gib in (8, 16, 32, 64, 128, 256, 512, 1024, 2048) if gib * GIB > machine.host_memory]
    first((on_host.format(gib), unlimited, job, replace(machine, host_memory=gib * GIB)) for gib in hosts)
    if machine.cpu:  # more processes on the same host need more of it
        return
    counts = [2**n for n in range(1, 11) if 2**n > machine.devices]
    words = "{} devices" if run.devices == "auto" else "run.devices: {}"
    more = [(count, run.with_values({"devices": count} if run.devices != "auto" else {})) for count in counts]
    first((words.format(count), asked, job, machine.on(count)) for count, asked in more)


def with_adapters(job: Job, rank: int) -> Job:
    return replace(job, rank=rank, adapters=job.shape.lora_parameters(rank), reference=False)


def with_memory(machine: Machine, memory: int) -> Machine:
    return replace(machine, device=replace(machine.device, memory=memory))
