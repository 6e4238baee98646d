"""Gradients that are summed over ranks as soon as a unit's backward pass is done (`run.shard: gradients`, ZeRO-2).

Each rank keeps the sum of its own stretch of a unit; the unit's whole sums exist only while they are made, and those of the next.
So every micro-batch has one collective a unit, in the order of the backward pass, and all ranks have equally many micro-batches.
With `overlap` a unit is summed over ranks while the backward pass is in the next one.

Why a layer is done when the gradient of its input is there: autograd accumulates gradients of parameters before it goes on to the
layer before (fused layers have added theirs inside their own backward pass). What is no layer (embedding, tied head) is done at
the end of the micro-batch.
"""

from __future__ import annotations

import torch

from trimtab.model.policy import Policy
from trimtab.model.weights import Unit
from trimtab.update.optimizer import MasterAdamW
from trimtab.update.peers import Pending


class EarlyReduction:
    """Sums of this rank's stretches, over ranks and micro-batches."""

    def __init__(self, policy: Policy, optimizer: MasterAdamW, overlap: bool = False) -> None:
        self._overlap = overlap
        self._under_way: tuple[Unit, torch.Tensor, Pending] | None = None
        """The unit whose sums are being summed over ranks, and these."""
        self._gradients, self._peers, self._weights = optimizer.gradients, optimizer.peers, optimizer.weights
        self._units = optimizer.shared_units
        self._of_layer = units_of_layers(policy, self._units)
        self._left: list[Unit] = []
        """Units that are not done in this micro-batch."""
        self.parts: dict[str, torch.Tensor] = {}
        """By unit: the sums of this rank's stretch."""
        policy.when_layer_is_done(self._layer_done)

    def begin(self) -> None:
        """A step begins: sums of zero."""
        self.parts = {
            unit.name: torch.zeros(
                unit.size // self._peers.shards,
                dtype=torch.promote_types(unit.dtype, torch.float32),
                device=self._weights.flats[unit.name].device,
            )
            for unit in self._units
        }

    def begin_micro_batch(self) -> None:
        self._left = list(self._units)

    def end_micro_batch(self) -> None:
        """Every unit is done."""
        for unit in list(self._left):
            self._reduce(unit)
        self._finish()

    def clear(self) -> None:
        """Only where nothing is under way: after a pass, or after `lose`."""
        self.parts, self._left = {}, []

    def lose(self) -> None:
        """The ranks that a sum was begun with have parted."""
        self._under_way = None

    def _layer_done(self, layer: int) -> None:
        for unit in self._of_layer.get(layer, ()):
            if unit in self._left:  # not a pass without gradients, nor a layer that is run a second time
                self._reduce(unit)

    @torch.no_grad()
    def _reduce(self, unit: Unit) -> None:
        self._finish()  # of whole sums, only these and the next unit's exist
        self._left.remove(unit)
        sums = self._gradients.take(unit)
        self._under_way = unit, sums, self._peers.begin_sum_into_parts(sums)
        if not self._overlap:
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        if self._under_way is None:
            return
        unit, sums, pending = self._under_way
        self._under_way = None
        pending.wait()
        size = len(sums) // self._peers.shards
        self.parts[unit.name] += sums[self._peers.shard * size : (self._peers.shard + 1) * size]


def units_of_layers(policy: Policy, units: list[Unit]) -> dict[int, list[Unit]]:
    """The units that hold parameters of one layer and of nothing else."""
    layers = list(getattr(policy.body, "layers", []))
    owner = {id(p): index for index, layer in enumerate(layers) for p in layer.parameters()}
    found: dict[int, list[Unit]] = {}
    for unit in units:
        readers = {owner.get(id(policy.weights.parameters[entry.name])) for entry in unit.entries}
        (only,) = readers if len(readers) == 1 else (None,)
        if only is not None:
            found.setdefault(only, []).append(unit)
    return found
