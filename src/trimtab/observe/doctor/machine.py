"""Reads the facts of this machine. No probe raises: a fact that cannot be read is reported as missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from trimtab.base.package import VERSION
from trimtab.base.units import GIB
from trimtab.observe.doctor.conflicts import SHOWN, installed_packages
from trimtab.observe.doctor.environment import reported_variables
from trimtab.observe.doctor.links import driver_links
from trimtab.observe.doctor.probe import ask_torch


@dataclass(frozen=True)
class Disk:
    what: str
    path: str
    free_gib: float
    total_gib: float


@dataclass(frozen=True)
class Driver:
    """Facts from NVIDIA's management library (NVML), which needs neither CUDA nor torch."""

    version: str | None = None
    cuda: str | None = None
    """Newest CUDA version that the driver supports."""
    gpus: list[dict[str, Any]] = field(default_factory=list)
    """One entry per GPU: name, total_gib, and used_gib over all processes."""
    error: str | None = None
    """Why the driver could not be queried."""
    links: Mapping[str, Any] = field(default_factory=dict)
    """What GPUs talk to each other over (links.py), where there are several."""


@dataclass(frozen=True)
class MachineReport:
    python: str
    system: str
    cores: int
    """Physical cores that this process may use."""
    host_total_gib: float
    host_available_gib: float
    host_limit_gib: float | None
    """The container's memory limit, if it is below the machine's memory."""
    disks: list[Disk]
    driver: Driver
    torch: Mapping[str, Any]
    """What torch sees (probe.py), or `error` if torch cannot be imported or does not answer."""
    packages: Mapping[str, str]
    variables: Mapping[str, str]
    nvcc: str | None = None
    """Path of NVIDIA's compiler, if it is installed."""

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        """GPUs that torch can use. The driver may list more."""
        return list(self.torch.get("gpus", []))

    def as_json(self) -> dict[str, Any]:
        shown = {name: self.packages[name] for name in SHOWN if name in self.packages}
        return asdict(self) | {"trimtab": VERSION, "packages": shown, "variables": reported_variables(self.variables)}


def look_at_machine(torch: Callable[[], Mapping[str, Any]] = ask_torch) -> MachineReport:
    memory = psutil.virtual_memory()
    return MachineReport(
        python=sys.version.split()[0],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=allowed_cores(),
        host_total_gib=memory.total / GIB,
        host_available_gib=memory.available / GIB,
        host_limit_gib=container_limit_gib(memory.total),
        disks=disks(),
        driver=ask_driver(),
        torch=torch(),
        packages=installed_packages() | {"trimtab": VERSION},
        variables=dict(os.environ),
        nvcc=find_nvcc(os.environ),
    )


def find_nvcc(variables: Mapping[str, str], usual: Path = Path("/usr/local/cuda")) -> str | None:
    """Looks where libraries that compile kernels on first use look."""
    homes = [Path(variables[name]) for name in ("CUDA_HOME", "CUDA_PATH") if variables.get(name)]
    places = [str(home / "bin" / "nvcc") for home in (*homes, usual)]
    return next(
        (place for place in places if os.access(place, os.X_OK)), shutil.which("nvcc", path=variables.get("PATH"))
    )


def allowed_cores() -> int:
    """Physical cores that this process may use. OMP_NUM_THREADS is not considered here; environment.py checks it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def container_limit_gib(total_bytes: int, root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The control group's memory limit, if it is below the machine's memory."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < total_bytes:
            return int(text) / GIB
    return None


def disks() -> list[Disk]:
    """Disks that runs and models are written to."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    found = []
    for what, path in (("runs (this folder)", Path.cwd()), ("models (Hugging Face cache)", cache)):
        there = next((part for part in (path, *path.parents) if part.exists()), Path("/"))
        try:
            usage = shutil.disk_usage(there)
        except OSError:
            continue
        found.append(Disk(what, str(path), usage.free / GIB, usage.total / GIB))
    return found


def ask_driver() -> Driver:
    """A machine without a driver is fine; a driver that answers with an error is not."""
    try:
        import pynvml
    except ImportError:
        return Driver(error="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        none = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return (
            Driver() if error.value in none and not Path("/proc/driver/nvidia").exists() else Driver(error=str(error))
        )
    try:
        number = pynvml.nvmlSystemGetCudaDriverVersion()
        gpus = [_driver_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        cuda = f"{number // 1000}.{number % 1000 // 10}"
        return Driver(pynvml.nvmlSystemGetDriverVersion(), cuda, gpus, links=driver_links(pynvml))
    except pynvml.NVMLError as error:
        return Driver(error=str(error))
    finally:
        pynvml.nvmlShutdown()


def _driver_gpu(pynvml: Any, index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "name": pynvml.nvmlDeviceGetName(handle),
        "total_gib": memory.total / GIB,
        "used_gib": memory.used / GIB,
    }
