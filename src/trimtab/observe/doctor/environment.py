"""Environment variables that make a run slow, blind or wrong without a word. Pure: from variables and facts to findings."""

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
"""Variables worth seeing in a report."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|AUTH")


class Surroundings(NamedTuple):
    """What decides whether a variable hurts here."""

    gpus: int
    cores: int
    packages: Mapping[str, str]


class Hurts(NamedTuple):
    """A variable, when its value hurts, what then happens, and what to do."""

    name: str
    when: Callable[[str, Surroundings], bool]
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


_SLEEP = "vLLM before 0.20.1 refuses to sleep and wake beside expandable segments"
_IPC = "weights cannot be handed to another engine as CUDA IPC handles from expandable segments"
_TORCHRUN = "one thread computes and one process runs rewards; torchrun and some containers set it"

TABLE = (
    Hurts(
        "CUDA_VISIBLE_DEVICES",
        _hides_gpus,
        "bad",
        "it hides every GPU from torch",
        "unset it, or name a GPU: 0",
        "a GPU's number, or not set",
    ),
    Hurts("TRITON_INTERPRET", _on_with_gpu, "bad", "kernels run in Python, a thousand times slower", "unset it"),
    Hurts("CUDA_LAUNCH_BLOCKING", _on_with_gpu, "warn", "every kernel is waited for; for debugging only", "unset it"),
    Hurts(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _on_with_gpu,
        "warn",
        "every tensor is a cudaMalloc, and peaks are not measured",
        "unset it",
    ),
    Hurts(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value, around: around.gpus > 0 and value.strip() == "1",
        "warn",
        "copies and kernels share one queue, so what is offloaded is waited for",
        "unset it",
    ),
    Hurts(
        "NVIDIA_TF32_OVERRIDE",
        _on_with_gpu,
        "warn",
        "float32 products lose 13 bits: engine and trainer may differ",
        "unset it",
    ),
    Hurts(
        "PYTORCH_ALLOC_CONF", _expandable_with_old_vllm, "bad", _SLEEP, "take expandable_segments out, or a newer vLLM"
    ),
    Hurts(
        "PYTORCH_CUDA_ALLOC_CONF",
        _expandable_with_old_vllm,
        "bad",
        _SLEEP,
        "take expandable_segments out, or a newer vLLM",
    ),
    Hurts(
        "PYTORCH_ALLOC_CONF",
        _expandable_with_engine,
        "warn",
        _IPC,
        "take expandable_segments out where engine and trainer share a GPU",
    ),
    Hurts(
        "PYTORCH_CUDA_ALLOC_CONF",
        _expandable_with_engine,
        "warn",
        _IPC,
        "take expandable_segments out where engine and trainer share a GPU",
    ),
    Hurts(
        "NCCL_CUMEM_ENABLE",
        _cumem_off,
        "bad",
        "with vLLM 0.16 and newer (NCCL 2.27) ncclCommInitRank fails; old guides advise it",
        "unset it",
    ),
    Hurts(
        "SGLANG_DETECT_SLOW_RANK",
        _on_with_sglang,
        "warn",
        "SGLang times products for a while before it starts; for debugging only",
        "unset it",
    ),
    Hurts(
        "OMP_NUM_THREADS",
        _few_threads,
        "warn",
        _TORCHRUN,
        "unset it, or pin run.threads and run.reward_workers",
        "not set, or the number of cores",
    ),
    Hurts(
        "OMP_WAIT_POLICY",
        lambda value, around: value.lower() == "active",
        "warn",
        "waiting threads hold the cores: beside a busy reward worker products took 60 times as long",
        "unset it",
    ),
    Hurts(
        "PYTHONOPTIMIZE",
        lambda value, around: value not in ("", "0"),
        "warn",
        "asserts are gone, and with them the checks of Trimtab's own invariants",
        "unset it",
    ),
)


def environment_findings(variables: Mapping[str, str], around: Surroundings) -> list[Finding]:
    return [
        Finding(
            rule=f"env:{hurts.name}",
            level=hurts.level,
            title=f"{hurts.name} hurts",
            unit="environment variable",
            healthy=hurts.healthy,
            evidence=f"{hurts.name}={variables[hurts.name]!r}",
            cause=hurts.cause,
            remedy=hurts.remedy,
            kind="safe",
        )
        for hurts in TABLE
        if hurts.name in variables and hurts.when(variables[hurts.name], around)
    ]


def told_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that are set and matter, by name."""
    return {
        name: variables[name]
        for name in sorted(variables)
        if SHOWN_VARIABLES.fullmatch(name) and not SECRET.search(name)
    }
