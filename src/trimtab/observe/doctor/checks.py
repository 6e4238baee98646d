"""Finds what is wrong with a machine. Pure: from its facts to findings. Having no GPU is not a finding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.observe.doctor.conflicts import TORCH, conflicts
from trimtab.observe.doctor.environment import Surroundings, environment_findings
from trimtab.observe.doctor.finding import LEVELS, Finding, Level
from trimtab.observe.doctor.links import link_findings
from trimtab.observe.doctor.machine import MachineReport
from trimtab.observe.format import gib, percent
from trimtab.rollout.external.kinds import KINDS

MIN_COMPUTE_CAPABILITY = (8, 0)
BAD_BELOW_DISK_GIB, WARN_BELOW_DISK_GIB = 2.0, 20.0
WARN_BELOW_HOST_GIB = 4.0
MAX_USED_SHARE = 0.1


def machine_findings(machine: MachineReport) -> list[Finding]:
    """The worst first."""
    around = Surroundings(max(len(machine.driver.gpus), len(machine.gpus)), machine.cores, machine.packages)
    found = [
        *_driver(machine),
        *_torch(machine),
        *(finding for index, gpu in enumerate(machine.gpus) for finding in _gpu(index, gpu)),
        *link_findings(machine.gpus, machine.torch),
        *_host(machine),
        *_disks(machine),
        *conflicts(dict(machine.packages)),
        *_engines(machine),
        *environment_findings(machine.variables, around),
    ]
    return sorted(found, key=lambda finding: -LEVELS.index(finding.level))


def _found(
    rule: str, level: Level, title: str, unit: str, healthy: str, evidence: str, cause: str, remedy: str
) -> Finding:
    """A finding with a safe remedy: no change to a machine changes what is learned."""
    return Finding(rule, level, title, unit, healthy, evidence, cause, remedy, "safe")


def _driver(machine: MachineReport) -> Iterator[Finding]:
    if machine.driver.error:
        yield _found(
            "driver",
            "warn" if machine.gpus or "not installed" in machine.driver.error else "bad",
            "the NVIDIA driver does not answer",
            "answer",
            "it lists its GPUs",
            machine.driver.error,
            "the driver was updated without a reboot (its library and kernel module differ), or the container cannot reach it",
            "run nvidia-smi to see the error; reboot, or reinstall the driver; pip install nvidia-ml-py",
        )


def _torch(machine: MachineReport) -> Iterator[Finding]:
    torch, driver = machine.torch, machine.driver
    hidden = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if error := torch.get("error"):
        yield _found(
            "torch",
            "bad",
            "torch cannot be imported or crashes",
            "answer",
            "torch imports and lists its devices",
            str(error),
            "torch is not installed, its libraries are missing or have other versions, or the driver crashed it",
            f"run python -c 'import torch' to see the whole error; pip install --force-reinstall 'torch{TORCH}'",
        )
    elif driver.gpus and not torch.get("cuda"):
        yield _found(
            "torch_without_cuda",
            "bad",
            "torch cannot use the GPU: it was built without CUDA",
            "build",
            "a build with CUDA",
            f"torch {torch.get('version')} on a machine with {len(driver.gpus)} x {driver.gpus[0]['name']}",
            "the CPU build of torch is installed",
            f"install torch for CUDA {driver.cuda} from https://pytorch.org",
        )
    elif driver.gpus and not torch.get("available") and hidden is None:
        yield _found(
            "torch_sees_no_gpu",
            "bad",
            "torch does not see the GPU",
            "devices",
            "torch sees as many as the driver lists",
            f"torch is built for CUDA {torch.get('cuda')}, the driver {driver.version} supports up to {driver.cuda}",
            "the driver is older than torch's CUDA, or the container has no access to the GPU",
            "update the driver, install torch for an older CUDA, or start the container with --gpus all",
        )


def _gpu(index: int, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    name, capability = f"GPU {index} ({gpu['name']})", tuple(gpu["capability"])
    if gpu.get("error"):
        yield _found(
            "gpu_fails",
            "bad",
            f"{name} cannot compute",
            "a small matrix product",
            "the result is correct",
            str(gpu["error"]),
            "other processes hold its memory, torch is not built for this GPU, or the GPU needs a reset",
            "run nvidia-smi and end the processes that hold its memory; nvidia-smi --gpu-reset",
        )
        return
    if capability < MIN_COMPUTE_CAPABILITY:
        yield _found(
            "gpu_old",
            "warn",
            f"{name} is too old for Trimtab's kernels",
            "compute capability",
            "8.0 (Ampere) or newer",
            f"{capability[0]}.{capability[1]}",
            "it has neither bfloat16 units nor variable-length flash attention",
            "use a newer GPU; on this one Trimtab trains in float32 with the models' own modules, which is slow",
        )
    if gpu["free_gib"] < (1 - MAX_USED_SHARE) * gpu["total_gib"]:
        yield _found(
            "gpu_busy",
            "warn",
            f"another process uses {name}",
            "GiB",
            f"{percent(1 - MAX_USED_SHARE)} of its memory free",
            f"{gib(gpu['free_gib'])} of {gib(gpu['total_gib'])} free",
            "another process holds memory; a run that starts now plans with the memory that is left",
            "run nvidia-smi to list the processes; end them, or choose another GPU with CUDA_VISIBLE_DEVICES",
        )


def _host(machine: MachineReport) -> Iterator[Finding]:
    if machine.host_available_gib < WARN_BELOW_HOST_GIB:
        yield _found(
            "host_memory",
            "warn",
            "little host memory is free",
            "GiB",
            f"{gib(WARN_BELOW_HOST_GIB)} or more",
            f"{gib(machine.host_available_gib)} of {gib(machine.host_total_gib)}",
            "other processes use it, or the machine is small; Trimtab loads weights through host memory",
            "end other processes on this machine",
        )
    if machine.host_limit_gib is not None:
        yield _found(
            "container_memory",
            "warn",
            "the container's memory limit is below the machine's memory",
            "GiB",
            "no limit",
            f"{gib(machine.host_limit_gib)} of {gib(machine.host_total_gib)}",
            "many libraries see the machine's memory, not this limit; a process that exceeds it is killed without a message",
            "raise the container's limit if a run needs more; Trimtab plans within the limit",
        )


def _engines(machine: MachineReport) -> Iterator[Finding]:
    """Checks engines in Trimtab's own environment. An engine in a separate environment is checked when a run starts."""
    for kind in KINDS.values():
        version = next((machine.packages[name] for name in kind.packages if name in machine.packages), None)
        if version is None:
            continue
        if not kind.serves(version):
            yield _found(
                f"engine:{kind.name}",
                "warn",
                f"Trimtab is not tested with {kind.title} {version}",
                "version",
                f"at least {kind.oldest}, below {kind.newest}",
                f"{kind.title} {version}",
                f"run.engine: {kind.name} refuses this version, and auto does not choose it",
                kind.install,
            )
        elif kind.compiles and machine.gpus and machine.nvcc is None:
            yield _found(
                f"compiler:{kind.name}",
                "warn",
                f"{kind.title} needs nvcc, which is not installed",
                "nvcc",
                "found in CUDA_HOME, on the PATH or in /usr/local/cuda",
                "not found",
                f"{kind.title} compiles some of its kernels on first use",
                "install the CUDA toolkit, or set CUDA_HOME to its folder",
            )


def _disks(machine: MachineReport) -> Iterator[Finding]:
    for disk in machine.disks:
        if disk.free_gib < WARN_BELOW_DISK_GIB:
            yield _found(
                "disk",
                "bad" if disk.free_gib < BAD_BELOW_DISK_GIB else "warn",
                f"little disk space for {disk.what}",
                "GiB",
                f"{gib(WARN_BELOW_DISK_GIB)} or more",
                f"{gib(disk.free_gib)} of {gib(disk.total_gib)} free at {disk.path}",
                "a checkpoint with its optimizer state takes 12 to 14 bytes per parameter, and a run keeps several",
                "free some space; set observe.dir or HF_HOME to another disk",
            )
