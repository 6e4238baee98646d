"""The engines that the contract is tested on, and the model that all of them can run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forking
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from tests.running import DEADLINE_S
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Engine
from trimtab.rollout.external.engine import ExternalEngine
from trimtab.rollout.external.kinds import KINDS
from trimtab.rollout.external.process import EngineLost
from trimtab.rollout.external.vllm.core import NEEDED, QUIET_DEFAULTS
from trimtab.rollout.native.engine import NativeEngine

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""vLLM's CPU attention wants heads of at least 32 numbers, SGLang's adapters on a CPU layers of 64."""
STOP = 2
LONGEST = 128


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def small_policy() -> Policy:
    return Policy(small_model().to(DEVICE))


def small_model(seed: int = 0) -> Any:
    """Its head is tied to its embedding: the weight that engines forget most easily."""
    return tiny_model("qwen2", seed=seed, tie_word_embeddings=True, **SHAPE)


ON_CPU = Path(__file__).parents[1] / "external" / "sglang" / "on_cpu" / "python"


@cache
def vllm_python() -> str | None:
    """The interpreter of an environment with vLLM: TRIMTAB_VLLM_PYTHON, this one, or where `make vllm` puts it (for CPUs)."""
    if find_spec("vllm") is not None:
        return sys.executable
    usual = Path.home() / ".cache" / "trimtab" / "vllm" / "bin" / "python"
    found = os.environ.get("TRIMTAB_VLLM_PYTHON") or (str(usual) if usual.exists() and DEVICE.type == "cpu" else None)
    if found is None:
        return None
    tried = subprocess.run([found, "-c", "import importlib.util as u; assert u.find_spec('vllm')"], check=False)
    return found if tried.returncode == 0 else None


@cache
def sglang_python() -> str | None:
    """The interpreter of an environment with SGLang: TRIMTAB_SGLANG_PYTHON, or this one. On a CPU SGLang is slow (a minute to
    start): there only if it is named, and changed so that it runs at all."""
    found = os.environ.get("TRIMTAB_SGLANG_PYTHON") or (sys.executable if DEVICE.type == "cuda" else None)
    if found is None:
        return None
    if DEVICE.type == "cpu":
        found = str(ON_CPU)
    tried = subprocess.run([found, "-c", "import importlib.util as u; assert u.find_spec('sglang')"], check=False)
    return found if tried.returncode == 0 else None


SLOW_IMPORTS = [
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.qwen2",
]


@cache
def warm_python(kind: str) -> str | None:
    """An interpreter in whose place vLLM starts in a second (forking.py), for tests of what it generates. Those of its process
    name the real one."""
    found = PYTHONS[kind]()
    if found is None or kind != "vllm" or DEVICE.type != "cpu":
        return found
    return forking.Warm(found, SLOW_IMPORTS, {**QUIET_DEFAULTS, **NEEDED, "OMP_NUM_THREADS": "1"}).python


NO_VLLM = "there is no environment with vLLM: run `make vllm`, or name its interpreter in TRIMTAB_VLLM_PYTHON"
NO_SGLANG = "needs an environment with SGLang: name its interpreter in TRIMTAB_SGLANG_PYTHON"
PYTHONS = {"vllm": vllm_python, "sglang": sglang_python}
MISSING = {"vllm": NO_VLLM, "sglang": NO_SGLANG}
OUTSIDE = [
    pytest.param(kind, marks=pytest.mark.skipif(PYTHONS[kind]() is None, reason=MISSING[kind])) for kind in PYTHONS
]
"""Engines in processes of their own, for `parametrize`."""


def make_engine(kind: str, policy: Policy, tokenizer: Any = None, **changes: Any) -> Engine:
    tokenizer = tokenizer or tiny_tokenizer()
    if kind == "native":
        settings = {"kv_bytes": 2**22, "page_tokens": 4, "max_sequences": 16, "prefill_tokens": 64, **changes}
        return NativeEngine(policy, tokenizer, [STOP], **settings)
    torch.set_num_threads(1)
    settings = {
        "kv_bytes": 2**26,
        "max_sequences": 16,
        "prefill_tokens": 64,
        "longest": LONGEST,
        "page_tokens": 32,
        "eager": True,
        **changes,
    }
    if "python" not in settings:  # starting one takes long, and tests of scripted processes need none
        settings["python"] = warm_python(kind) or ""
    return ExternalEngine(KINDS[kind], policy, tokenizer, [STOP], **settings)


def kill_now(engine: ExternalEngine) -> None:
    """SIGKILL for its one process. What that has sent and nobody has read is lost with it: how much that is depends on time."""
    (member,) = engine.members
    os.kill(member.running.pid, signal.SIGKILL)
    with contextlib.suppress(EngineLost):
        while True:
            member.running.receive(DEADLINE_S)
