"""What layers carry, on its way between slots: to a filling that goes on from a cached prefix, to a snapshot, to samples that are
forked. Nothing where layers carry nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trimtab.model.transfer import to_device
from trimtab.rollout.native.scheduler import Filling, Fork, Scheduler
from trimtab.rollout.native.snapshots import Snapshots
from trimtab.rollout.native.states import StateCache

InParts = Callable[[Callable[[slice], None], int, str], None]
"""Does work in parts where memory is short."""


class Carrying:
    """Owns the snapshots."""

    def __init__(self, states: StateCache | None, page_tokens: int, device: torch.device, in_parts: InParts) -> None:
        self._states, self._device, self._in_parts = states, device, in_parts
        self.snapshots = None if states is None else Snapshots(states.prompts, page_tokens)

    def begin(self, states: StateCache | None) -> Snapshots | None:
        """No prompt has a slot yet; returns the slots. `states`: where they are now."""
        self._states = states
        if self.snapshots is not None:
            self.snapshots.begin()
        return self.snapshots

    def forget_all(self) -> None:
        if self.snapshots is not None:
            self.snapshots.forget_all()

    def next_fill(self, work: Scheduler) -> list[tuple[Filling, int]]:
        """What to prefill now; where that goes on from a cached prefix, its slot holds what layers carried there."""
        chosen = work.next_fill()
        if self.snapshots is not None:
            self._copy([(slot, filling.slot) for slot, filling in work.restores])
            work.restores.clear()
            self.snapshots.copied()
        return chosen

    def keep(self, chosen: Sequence[tuple[Filling, int]]) -> None:
        """Keep what layers carry at the end of prefixes that were met before."""
        if self.snapshots is not None:
            marked = [filling for filling, _ in chosen if filling.done == filling.mark]
            slots = [self.snapshots.keep(filling.tokens[: filling.mark]) for filling in marked]
            self._copy([(filling.slot, slot) for filling, slot in zip(marked, slots) if slot is not None])

    def hand(self, forks: Sequence[Fork]) -> None:
        """Give samples what layers carried at the end of their prompts."""
        if self.snapshots is not None:
            self._copy([(fork.slot, fork.sequence.row) for fork in forks])

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        states = self._states
        if states is not None and pairs:
            slots = to_device(torch.tensor(pairs).t().contiguous(), self._device)
            self._in_parts(lambda part: states.copy(slots[:, part]), len(pairs), "copying a state")
