"""Environment variables that silently make a run slow or wrong, or hide its GPUs. Pure: from variables and facts to findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from trimtab.observe.doctor.finding import Finding, Level

TRUE = ("1", "true", "yes", "on")
SHOWN_VARIABLES = re.compile(
    r"CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|CUDA_DEVICE_MAX_CONNECTIONS|PYTORCH_.*ALLOC_CONF|PYTORCH_NO_CUDA_MEMORY_CACHING|"
    r"OMP_.*|MKL_NUM_THREADS|NCCL_.*|VLLM_.*|SGLANG_.*|CUDA_HOME|RAY_.*|TRITON_INTERPRET|TORCH_LOGS|NVIDIA_TF32_OVERRIDE|"
    r"HF_(HUB|DATASETS)_OFFLINE|TRANSFORMERS_OFFLINE|HF_HOME|TOKENIZERS_PARALLELISM|PYTHONOPTIMIZE"
)
"""Variables that the report lists when they are set."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|AUTH")


class Surroundings(NamedTuple):
    """Facts of the machine that decide whether a variable is a problem."""

    gpus: int
    cores: int
    packages: Mapping[str, str]


class HarmfulVariable(NamedTuple):
    """A variable, the values of it that are a problem, what happens then, and what to do."""

    name: str
    is_harmful: Callable[[str, Surroundings], bool]
    level: Level
    cause: str
    remedy: str
    healthy: str = "not set"


def _on(value: str, around: Surroundings) -> bool:
    return value.lower() in TRUE


def _on_with_gpu(value: str, around: Surroundings) -> bool:
    return around.gpus > 0 and _on(value, around)


def _hides_gpus(value: str, around: Surroundings) -> bool:
    return around.gpus > 0 and value.strip() in ("", "-1", "none", "void", "NoDevFiles")


def _few_threads(value: str, around: Surroundings) -> bool:
    return value.strip() == "1" and around.cores > 1


def _expandable_with_old_vllm(value: str, around: Surroundings) -> bool:
    return _expandable(value) and "vllm" in around.packages and _older(around.packages["vllm"], "0.20.1")


def _expandable_with_engine(value: str, around: Surroundings) -> bool:
    engines = {"vllm", "sglang"} & set(around.packages)
    return _expandable(value) and bool(engines) and not _expandable_with_old_vllm(value, around)


def _expandable(value: str) -> bool:
    return "expandable_segments:true" in value.replace(" ", "").lower()


def _older(version: str, than: str) -> bool:
    try:
        return Version(version) < Version(than)
    except InvalidVersion:
        return False


def _cumem_off(value: str, around: Surroundings) -> bool:
    vllm = around.packages.get("vllm")
    return value.strip() == "0" and vllm is not None and not _older(vllm, "0.16")


def _on_with_sglang(value: str, around: Surroundings) -> bool:
    return "sglang" in around.packages and _on(value, around)


_SLEEP = "vLLM before 0.20.1 cannot release its memory between rollouts while expandable segments are on"
_IPC = "with expandable segments the engine cannot read the trainer's weights in place; they are copied through host memory"
_TORCHRUN = "with 1, Trimtab uses one compute thread and one reward worker; torchrun and some containers set it"

TABLE = (
    HarmfulVariable(
        "CUDA_VISIBLE_DEVICES",
        _hides_gpus,
        "bad",
        "this value hides every GPU from torch",
        "unset it, or set it to the number of a GPU, such as 0",
        "a GPU's number, or not set",
    ),
    HarmfulVariable(
        "TRITON_INTERPRET",
        _on_with_gpu,
        "bad",
        "Triton interprets its kernels in Python, a thousand times slower",
        "unset it",
    ),
    HarmfulVariable(
        "CUDA_LAUNCH_BLOCKING",
        _on_with_gpu,
        "warn",
        "the host waits for every kernel; this is for debugging only",
        "unset it",
    ),
    HarmfulVariable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _on_with_gpu,
        "warn",
        "torch calls cudaMalloc for every tensor, which is slow, and measures no memory peaks",
        "unset it",
    ),
    HarmfulVariable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value, around: around.gpus > 0 and value.strip() == "1",
        "warn",
        "copies and kernels share one queue, so every offload copy delays the computation",
        "unset it",
    ),
    HarmfulVariable(
        "NVIDIA_TF32_OVERRIDE",
        _on_with_gpu,
        "warn",
        "float32 matrix products lose 13 bits of precision, so the engine's and the trainer's log-probs may differ",
        "unset it",
    ),
    HarmfulVariable(
        "PYTORCH_ALLOC_CONF",
        _expandable_with_old_vllm,
        "bad",
        _SLEEP,
        "remove expandable_segments from it, or install a newer vLLM",
    ),
    HarmfulVariable(
        "PYTORCH_CUDA_ALLOC_CONF",
        _expandable_with_old_vllm,
        "bad",
        _SLEEP,
        "remove expandable_segments from it, or install a newer vLLM",
    ),
    HarmfulVariable(
        "PYTORCH_ALLOC_CONF",
        _expandable_with_engine,
        "warn",
        _IPC,
        "remove expandable_segments from it if engine and trainer share a GPU",
    ),
    HarmfulVariable(
        "PYTORCH_CUDA_ALLOC_CONF",
        _expandable_with_engine,
        "warn",
        _IPC,
        "remove expandable_segments from it if engine and trainer share a GPU",
    ),
    HarmfulVariable(
        "NCCL_CUMEM_ENABLE",
        _cumem_off,
        "bad",
        "with 0, ncclCommInitRank fails in vLLM 0.16 and newer (NCCL 2.27); guides for older versions recommend it",
        "unset it",
    ),
    HarmfulVariable(
        "SGLANG_DETECT_SLOW_RANK",
        _on_with_sglang,
        "warn",
        "SGLang runs a matrix benchmark before it starts; this is for debugging only",
        "unset it",
    ),
    HarmfulVariable(
        "OMP_NUM_THREADS",
        _few_threads,
        "warn",
        _TORCHRUN,
        "unset it, or set run.threads and run.reward_workers",
        "not set, or the number of cores",
    ),
    HarmfulVariable(
        "OMP_WAIT_POLICY",
        lambda value, around: value.lower() == "active",
        "warn",
        "idle threads keep their cores busy: next to a busy reward worker, matrix products took 60 times as long",
        "unset it",
    ),
    HarmfulVariable(
        "PYTHONOPTIMIZE",
        lambda value, around: value not in ("", "0"),
        "warn",
        "Python skips assert statements, and with them Trimtab's internal checks",
        "unset it",
    ),
)


def environment_findings(variables: Mapping[str, str], around: Surroundings) -> list[Finding]:
    return [
        Finding(
            rule=f"env:{variable.name}",
            level=variable.level,
            title=f"{variable.name} is set to a harmful value",
            unit="environment variable",
            healthy=variable.healthy,
            evidence=f"{variable.name}={variables[variable.name]!r}",
            cause=variable.cause,
            remedy=variable.remedy,
            kind="safe",
        )
        for variable in TABLE
        if variable.name in variables and variable.is_harmful(variables[variable.name], around)
    ]


def reported_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The set variables that a report lists, by name. Secrets are left out."""
    return {
        name: variables[name]
        for name in sorted(variables)
        if SHOWN_VARIABLES.fullmatch(name) and not SECRET.search(name)
    }
