"""Gradients that are summed over ranks while the last backward pass of a step still runs (`run.overlap` with `run.shard: none` or
`optimizer`; `overlap_comm` elsewhere).

The sums of a unit are complete when the last micro-batch's backward pass has left it: its sum over ranks begins then, and the
optimizer waits for it before it asks for the norm. The same sums in the same order as without, so the same bits.

    order      head | last layer | ... | first layer | embedding, vectors, adapters
    begun      when the gradient of the layer's input is there       when the pass is done

Ranks have different numbers of micro-batches, or none: all begin the same units in the same order, each when it gets there, and a
rank without work begins all at once, with zeros.

A rank whose pass fails half-way has others waiting for what it has not begun. `give_up` begins that, with whatever is there, and
waits for all: nobody uses these sums, for the step is abandoned on every rank, and nobody is left waiting. It needs nothing of
others but what they begin by themselves.
"""

from __future__ import annotations

from trimtab.model.policy import Policy
from trimtab.update.early_reduction import units_of_layers
from trimtab.update.optimizer import MasterAdamW


class OverlappedReduction:
    """Begins sums over ranks as soon as a unit is done."""

    def __init__(self, policy: Policy, optimizer: MasterAdamW) -> None:
        self._optimizer = optimizer
        self._order = _order(policy, optimizer)
        self._left: list[tuple[int | None, str]] = []
        """What is not begun in this step."""
        self._in_last_pass = False
        self._done: set[int] = set()
        """Layers that the last backward pass has left."""
        policy.when_layer_is_done(self._layer_done)

    def begin(self) -> None:
        """A step begins. From here on others may wait for this rank."""
        self._left, self._in_last_pass, self._done = list(self._order), False, set()

    @property
    def is_awaited(self) -> bool:
        """Others wait for something that this rank has not begun, or will."""
        return bool(self._left)

    def last_pass(self) -> None:
        """The backward pass that follows is the last one of the step."""
        self._in_last_pass = True

    def begin_rest(self) -> None:
        """All gradients of the step are complete."""
        while self._left:
            self._begin_next()

    def lose(self) -> None:
        """The ranks that sums were begun with have parted: nobody waits any more."""
        self._left, self._in_last_pass = [], False
        self._optimizer.lose_begun_sums()

    def give_up(self) -> None:
        """Begin what others wait for. They see to it that it ends."""
        self._in_last_pass = False
        self.begin_rest()

    def _layer_done(self, layer: int) -> None:
        if self._in_last_pass:
            self._done.add(layer)
            while self._left and self._left[0][0] in self._done:
                self._begin_next()

    def _begin_next(self) -> None:
        self._optimizer.begin_sum(self._left[0][1])
        self._left.pop(0)


def _order(policy: Policy, optimizer: MasterAdamW) -> list[tuple[int | None, str]]:
    """Units in the order of the backward pass, each with the layer that it is done with; None: with the whole pass."""
    of_layer = units_of_layers(policy, optimizer.units)
    found: list[tuple[int | None, str]] = []
    for layer in sorted(of_layer, reverse=True):
        found += [(layer, unit.name) for unit in of_layer[layer]]
    known = {name for _, name in found}
    rest = [unit.name for unit in optimizer.units if unit.name not in known]
    last = max(of_layer, default=None)
    head, embedding = (
        policy.weights.place(weight)[0].name if weight in policy.weights else None
        for weight in (policy.head.weight_VE, policy.model.get_input_embeddings().weight)
    )
    if last is not None and head is not None and head != embedding and head in rest:
        rest.remove(head)  # hidden states have their gradient when the head has its own
        found.insert(0, (last, head))
    return found + [(None, name) for name in rest]
