"""This machine, as a plan sees it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar, TypeVarTuple

import psutil
import torch

from trimtab.base.errors import ConfigError, MemoryExhausted, Problem
from trimtab.base.units import GIB, MIB
from trimtab.config.run import Run
from trimtab.model.memory import Shortage, attempt, free, host_memory
from trimtab.plan.devices import Device, nearest
from trimtab.plan.job import Machine
from trimtab.plan.ledger import CUDA_CONTEXT_BYTES
from trimtab.plan.rules import workers_for
from trimtab.plan.visible import ChosenDevices, VisibleDevice, choose_devices
from trimtab.rollout.external.find import engines_here


def pick_device(run: Run) -> torch.device:
    """Of this machine."""
    if run.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError([Problem("run.device", "torch sees no CUDA device on this machine", "Write auto or cpu.")])
    return torch.device(run.device)


@contextmanager
def memory_limit(run: Run, device: torch.device) -> Iterator[None]:
    """While it is open, this process takes no more of the device than `run.memory`: torch's allocator gets that less the driver's
    part, and rollout's own memory counts against the same share (model/memory.py). On a CPU the plan alone keeps to it."""
    if run.memory is None or device.type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device.index)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(allocator_share(run.memory, total, before), device.index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device.index)


def allocator_share(memory: int, total: int, before: float = 1.0) -> float:
    """Share of a device of `total` bytes that torch may allocate so that the process stays within `memory`."""
    return min(before, max(0, memory - CUDA_CONTEXT_BYTES) / total)


Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


def load_within(run: Run, device: torch.device, load: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
    """What `load` gives; a MemoryExhausted that names the limit where memory runs out on the way, before anything is planned."""
    outcome = attempt(load, *args)
    if not isinstance(outcome, Shortage):
        return outcome
    free(device)
    limit = "" if run.memory is None else f" within run.memory, {run.memory / GIB:.1f} GiB"
    fix = "Use a smaller model" if run.memory is None else "Raise run.memory, or use a smaller model"
    raise MemoryExhausted(f"model.path: the weights do not fit on the device{limit} ({outcome.message}). {fix}.")


def pick_reward_workers(run: Run) -> int:
    """Chosen without a plan: reward functions are tried before a model is loaded."""
    return workers_for(physical_cores()) if run.reward_workers == "auto" else run.reward_workers


def physical_cores() -> int:
    """Cores to compute with: OMP_NUM_THREADS where the user has set it, else the physical ones this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory()[1]


def machine_here(device: torch.device) -> Machine:
    """The machine that runs this, with one device and the memory that a plan may count on: what is free and what this process has
    already. `machine_of_run` counts the others."""
    host = free_memory(torch.device("cpu")) + psutil.Process().memory_info().rss
    if device.type != "cuda":
        return Machine(nearest("CPU", host), 1, host, physical_cores(), cpu=True, here=True)
    return Machine(_device_here(device), 1, host, physical_cores(), engines=engines_here(), here=True)


def machine_of_run(run: Run, device: torch.device) -> tuple[Machine, ChosenDevices | None]:
    """This machine with all the devices that a run may use, and which these are; None where there is no GPU. Looking takes no
    memory of any: with several devices only their ranks do."""
    if device.type != "cuda":
        return machine_here(device), None
    chosen = choose_devices(run, visible_devices())
    host = free_memory(torch.device("cpu")) + psutil.Process().memory_info().rss
    first, count = chosen.devices[0], len(chosen.devices)
    known = as_planned(nearest(first.name, chosen.free, first.total), device, first.capability)
    return Machine(known, count, host, physical_cores(), per_host=count, engines=engines_here(), here=True), chosen


def visible_devices() -> list[VisibleDevice]:
    """Every GPU that this process sees, with what is free of it. Names and sizes take no memory of a device; torch's own count of
    free bytes would (a context each), so the driver's tool is asked first."""
    free = _free_by_uuid()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        known = free.get(str(properties.uuid)) if hasattr(properties, "uuid") else None
        left = int(torch.cuda.mem_get_info(index)[0]) if known is None else known
        capability = (properties.major, properties.minor)
        found.append(VisibleDevice(index, properties.name, properties.total_memory, left, capability))
    return found


def _free_by_uuid() -> dict[str, int]:
    """Free bytes of each GPU as nvidia-smi tells them; empty where it is missing or says something else."""
    ask = ["nvidia-smi", "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
        rows = [line.split(",") for line in told.splitlines() if line.strip()]
        return {uuid.strip().removeprefix("GPU-"): int(mib) * MIB for uuid, mib in rows}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def _device_here(device: torch.device) -> Device:
    """The device as a plan sees it, which counts the CUDA context: this process has it already, so what is free lacks it."""
    properties = torch.cuda.get_device_properties(device)
    free = free_memory(device) + torch.cuda.memory_reserved(device)
    share = torch.cuda.get_per_process_memory_fraction(device.index)
    memory = min(free, int(share * properties.total_memory)) + CUDA_CONTEXT_BYTES
    found = nearest(properties.name, memory, properties.total_memory)
    return as_planned(found, device, (properties.major, properties.minor))


def as_planned(found: Device, device: torch.device, capability: tuple[int, int]) -> Device:
    from trimtab.rollout.native.arena import why_not_lendable

    major, _ = capability
    return replace(found, lends=not why_not_lendable(device), tiled_head=major >= 9, bfloat16=major >= 8)
