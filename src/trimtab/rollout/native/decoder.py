"""What the engine asks of a device. There are two: `eager.py` for any, `cuda.py` for those with kernels.

A decoder that runs out of memory raises; tokens it had appended to rows by then are the engine's to forget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from trimtab.config.learn import Sampling
from trimtab.rollout.native import scheduler as plan
from trimtab.rollout.native.cache import KVCache, PrefillPlan
from trimtab.rollout.native.rows import Rows


class Decoder(Protocol):
    """How a device takes decode steps."""

    cache: KVCache
    description: str
    """What runs, and why not something faster, in words for the user."""
    replays: int
    """Steps so far that were replays of a graph."""

    @property
    def outside_bytes(self) -> int:
        """Device memory held that torch's allocator does not know of."""
        ...

    most_steps: int
    """Steps of a round: the host looks at the sequences after these."""
    rounds_ahead: int
    """Rounds that may be launched before the host has looked at the ones before."""

    def refresh(self) -> None: ...

    def begin(self, rows: Rows, sampling: Sampling, longest: int) -> None: ...

    def prefill(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PrefillPlan) -> torch.Tensor: ...

    def draw(self, index_B: torch.Tensor, hidden_BE: torch.Tensor) -> None: ...

    def run(self, live: Sequence[plan.Sequence], steps: int) -> None: ...

    def lend(self) -> None: ...

    def reclaim(self) -> None: ...

    def close(self) -> None: ...
