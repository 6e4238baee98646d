"""What the engine asks of a device. There are two: `eager.py` for any, `cuda.py` for those with kernels.

A decoder that runs out of memory raises; tokens it had appended to rows by then are the engine's to forget.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from trimtab.config.learn import Sampling
from trimtab.rollout.native.cache import KVCache, PrefillPlan
from trimtab.rollout.native.rows import Rows
from trimtab.rollout.native.scheduler import Sequence


class Decoder(Protocol):
    """How a device takes decode steps."""

    cache: KVCache
    description: str
    """What runs, and why not something faster, in words for the user."""
    replays: int
    """Steps so far that were replays of a graph."""

    @property
    def non_torch_bytes(self) -> int:
        """Device memory held that torch's allocator does not know of."""
        ...

    most_steps: int
    """Steps of a round: the host looks at the sequences after these."""
    rounds_ahead: int
    """Rounds that may be launched before the host has looked at the ones before."""

    def refresh(self) -> None:
        """Call after the trainer's weights changed."""
        ...

    def begin(self, rows: Rows, sampling: Sampling, longest: int) -> None:
        """A call with these rows and settings begins, whose sequences have at most `longest` tokens."""
        ...

    def prefill(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
        """Last hidden states of a packed row, whose keys and values go into their pages."""
        ...

    def draw(self, index_B: torch.Tensor, hidden_BE: torch.Tensor) -> None:
        """Draw the next token of each row from its last hidden state."""
        ...

    def run(self, live: Seq[Sequence], steps: int) -> None:
        """Decode `steps` tokens for each sequence, or up to its end where that comes earlier."""
        ...

    def lend(self) -> None:
        """Give up the memory of keys, values and intermediates until `reclaim`."""
        ...

    def reclaim(self) -> None:
        """Take the memory back, with undefined contents; can be tried again where there is too little of it."""
        ...

    def close(self) -> None:
        """Free the memory for good."""
        ...
