"""A round of the engine (engine.py): work that was launched, and the sequences that ended in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.rollout.native.rows import Outputs
from trimtab.rollout.native.scheduler import Sequence
from trimtab.rollout.trajectory import Finish


@dataclass
class Round:
    """Launched work, and the answers that will be there when it is done."""

    sequences: list[Sequence]
    facts: torch.Tensor
    tokens: torch.Tensor | None
    """What those sequences drew, where stop strings have to be looked for."""
    done: torch.cuda.Event | None
    launched: int
    """Pieces of work up to this one."""

    @property
    def idle(self) -> bool:
        """True once the device has done it."""
        return self.done is None or self.done.query()

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


@dataclass
class Ended:
    """Sequences that are off their rows, and what they drew."""

    sequences: list[Sequence]
    finish: list[Finish]
    outputs: Outputs
