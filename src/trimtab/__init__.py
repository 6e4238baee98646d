"""Trimtab: say what to learn, and it decides how to run it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from trimtab.base.package import VERSION

if "OMP_WAIT_POLICY" not in os.environ:
    # OpenMP threads spin while they wait; with one other busy process on the machine (a reward worker is one) they then hold the
    # cores from each other and small products take 60 times as long. Spinning about 0.1 ms keeps an idle machine's speed and
    # costs a loaded one a factor of four. Read when torch is first imported. Measured: docs/log.md.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")

__version__ = VERSION

if TYPE_CHECKING:
    from trimtab.api import evaluate as evaluate
    from trimtab.api import reward_model as reward_model
    from trimtab.api import sft as sft
    from trimtab.api import train as train
    from trimtab.observe.result import Result as Result
    from trimtab.observe.result import RunFolder
    from trimtab.rollout.conversations.observation import Observation as Observation

    Run = RunFolder


def __getattr__(name: str) -> Any:
    """Load the API on first use: reward workers and `trimtab --help` import this package and must not pay for torch."""
    if name in ("train", "sft", "reward_model", "evaluate"):
        from trimtab import api

        return getattr(api, name)
    if name in ("Run", "Result"):
        from trimtab.observe import result

        return result.RunFolder if name == "Run" else result.Result
    if name == "Observation":
        from trimtab.rollout.conversations.observation import Observation

        return Observation
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
