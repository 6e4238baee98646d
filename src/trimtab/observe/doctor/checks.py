"""What is wrong with a machine: pure, from its facts to findings. A machine without a GPU is not sick."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.observe.doctor.conflicts import TORCH, conflicts
from trimtab.observe.doctor.environment import Surroundings, environment_findings
from trimtab.observe.doctor.finding import LEVELS, Finding, Level
from trimtab.observe.doctor.machine import MachineReport
from trimtab.observe.format import gib, percent
from trimtab.rollout.external.kinds import KINDS

LEAST_CAPABILITY = (8, 0)
LEAST_DISK_GIB, LOW_DISK_GIB = 2.0, 20.0
LEAST_HOST_GIB = 4.0
BUSY_SHARE = 0.1


def machine_findings(machine: MachineReport) -> list[Finding]:
    """The worst first."""
    around = Surroundings(max(len(machine.driver.gpus), len(machine.gpus)), machine.cores, machine.packages)
    found = [
        *_driver(machine),
        *_torch(machine),
        *(finding for index, gpu in enumerate(machine.gpus) for finding in _gpu(index, gpu)),
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
    """Nothing about a machine changes what is learned: every remedy is safe."""
    return Finding(rule, level, title, unit, healthy, evidence, cause, remedy, "safe")


def _driver(machine: MachineReport) -> Iterator[Finding]:
    if machine.driver.error:
        yield _found(
            "driver",
            "warn" if machine.gpus or "not installed" in machine.driver.error else "bad",
            "the NVIDIA driver does not answer",
            "answer",
            "it lists its devices",
            machine.driver.error,
            "the driver was updated without a reboot, its library and its kernel module differ, or the container lacks it",
            "run nvidia-smi; reboot, or reinstall the driver; pip install nvidia-ml-py",
        )


def _torch(machine: MachineReport) -> Iterator[Finding]:
    torch, driver = machine.torch, machine.driver
    hidden = machine.variables.get("CUDA_VISIBLE_DEVICES")
    if error := torch.get("error"):
        yield _found(
            "torch",
            "bad",
            "torch does not work",
            "answer",
            "it imports and lists its devices",
            str(error),
            "it is not installed, its libraries are missing or of another version, or the driver crashed it",
            f"python -c 'import torch' shows all of it; pip install --force-reinstall 'torch{TORCH}'",
        )
    elif driver.gpus and not torch.get("cuda"):
        yield _found(
            "torch_without_cuda",
            "bad",
            "torch cannot use the GPU: it was built without CUDA",
            "build",
            "a build with CUDA",
            f"torch {torch.get('version')} beside {len(driver.gpus)} x {driver.gpus[0]['name']}",
            "the CPU build was installed",
            f"install torch for CUDA {driver.cuda} from https://pytorch.org",
        )
    elif driver.gpus and not torch.get("available") and hidden is None:
        yield _found(
            "torch_sees_no_gpu",
            "bad",
            "torch does not see the GPU",
            "devices",
            "as many as the driver lists",
            f"torch is built for CUDA {torch.get('cuda')}, the driver {driver.version} serves up to {driver.cuda}",
            "a driver older than torch's CUDA, or devices that the container may not open",
            "update the driver, install torch for an older CUDA, or start the container with --gpus all",
        )


def _gpu(index: int, gpu: Mapping[str, Any]) -> Iterator[Finding]:
    name, capability = f"GPU {index} ({gpu['name']})", tuple(gpu["capability"])
    if gpu.get("error"):
        yield _found(
            "gpu_fails",
            "bad",
            f"{name} cannot compute",
            "a small product",
            "it comes out right",
            str(gpu["error"]),
            "memory taken by others, a torch that was not built for it, or a device that needs a reset",
            "look at nvidia-smi; end what holds its memory; nvidia-smi --gpu-reset",
        )
        return
    if capability < LEAST_CAPABILITY:
        yield _found(
            "gpu_old",
            "warn",
            f"{name} is older than what kernels are written for",
            "compute capability",
            "8.0 (Ampere) or newer",
            f"{capability[0]}.{capability[1]}",
            "no bfloat16 units and no variable-length flash attention",
            "expect model.dtype float32 and the models' own layers: it works, slowly",
        )
    if gpu["free_gib"] < (1 - BUSY_SHARE) * gpu["total_gib"]:
        yield _found(
            "gpu_busy",
            "warn",
            f"{name} is in use",
            "GiB",
            f"{percent(1 - BUSY_SHARE)} of its memory free",
            f"{gib(gpu['free_gib'])} of {gib(gpu['total_gib'])} free",
            "another process holds memory; what is planned now is planned for what is left",
            "nvidia-smi lists processes; end them, or choose another GPU with CUDA_VISIBLE_DEVICES",
        )


def _host(machine: MachineReport) -> Iterator[Finding]:
    if machine.host_available_gib < LEAST_HOST_GIB:
        yield _found(
            "host_memory",
            "warn",
            "little host memory is free",
            "GiB",
            f"{gib(LEAST_HOST_GIB)} and more",
            f"{gib(machine.host_available_gib)} of {gib(machine.host_total_gib)}",
            "other processes, or a small machine; weights are read through host memory",
            "end what else runs here",
        )
    if machine.host_limit_gib is not None:
        yield _found(
            "container_memory",
            "warn",
            "the container may use less memory than the machine shows",
            "GiB",
            "no limit, or one that is known",
            f"{gib(machine.host_limit_gib)} of {gib(machine.host_total_gib)}",
            "choices are made from what the machine shows; beyond the limit the process is killed without a word",
            "raise the container's limit, or pin run.token_budget and run.rollout.kv_memory on a CPU",
        )


def _engines(machine: MachineReport) -> Iterator[Finding]:
    """Checks engines that are installed beside Trimtab. One in an environment of its own is looked at when a run starts."""
    for kind in KINDS.values():
        version = next((machine.packages[name] for name in kind.packages if name in machine.packages), None)
        if version is None:
            continue
        if not kind.serves(version):
            yield _found(
                f"engine:{kind.name}",
                "warn",
                f"{kind.title} {version} is outside of what Trimtab was tested with",
                "version",
                f"from {kind.oldest} up to, not including, {kind.newest}",
                f"{kind.title} {version}",
                f"run.engine: {kind.name} refuses it, and auto passes over it",
                kind.install,
            )
        elif kind.compiles and machine.gpus and machine.nvcc is None:
            yield _found(
                f"compiler:{kind.name}",
                "warn",
                f"{kind.title} finds no compiler",
                "nvcc",
                "in CUDA_HOME, on the path or in /usr/local/cuda",
                "there is none",
                f"{kind.title} compiles some of its kernels when they are first used",
                "install the CUDA toolkit, or set CUDA_HOME to where it is",
            )


def _disks(machine: MachineReport) -> Iterator[Finding]:
    for disk in machine.disks:
        if disk.free_gib < LOW_DISK_GIB:
            yield _found(
                "disk",
                "bad" if disk.free_gib < LEAST_DISK_GIB else "warn",
                f"little disk space for {disk.what}",
                "GiB",
                f"{gib(LOW_DISK_GIB)} and more",
                f"{gib(disk.free_gib)} of {gib(disk.total_gib)} free at {disk.path}",
                "a checkpoint takes 12 to 14 bytes a parameter with its optimizer, and a few are kept",
                "free some space; set observe.dir or HF_HOME to another disk",
            )
