"""Float32 sums (or wider) of gradients over the micro-batches of a step.

The fused layers' and the head's products add to them directly, on a GPU without rounding to half precision in between; what
autograd makes (embeddings, the model's own modules) is added by hooks. The sums of a unit have the layout of its weights
(weights.py), so one product fills those of projections that are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trimtab.model.weights import Unit, WeightStore


class Gradients:
    """Sums of gradients by unit; a unit's exist from its first gradient of a step until `clear`."""

    def __init__(self, weights: WeightStore, parameters: Iterable[torch.Tensor]) -> None:
        """`parameters`: those of the store whose gradients are summed here."""
        self._weights = weights
        self._ids = {id(parameter) for parameter in parameters}
        self.sums: dict[str, torch.Tensor] = {}
        """The gradient sums of each unit, in the unit's own layout."""
        self._views: dict[tuple[int, ...], torch.Tensor] = {}
        """Parts of the sums, by the parameters that they are for: what a product adds to in every micro-batch."""
        self._touched: set[int] = set()
        """Parameters that have a gradient; the others of their unit have zeros that mean nothing."""

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._ids

    def of(self, *parameters: torch.Tensor) -> torch.Tensor | None:
        """The sum to add to for a parameter, or for several that are joined, of which some may be frozen; None where none of them
        is summed here."""
        key = tuple(map(id, parameters))
        if key not in self._views:
            if self._ids.isdisjoint(key):
                return None
            self._views[key] = self._view(parameters)
            self._touched |= self._ids.intersection(key)
        return self._views[key]

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The sum for a parameter; None where nothing has been added yet."""
        return self._view([parameter]) if id(parameter) in self._touched else None

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The sum for a parameter, zeros where nothing was added; it counts as touched only once something is."""
        return self._view([parameter])

    def add(self, parameter: torch.Tensor) -> None:
        """Take over a gradient that autograd made."""
        if parameter.grad is not None:
            total = self.of(parameter)
            assert total is not None
            total += parameter.grad
            parameter.grad = None

    def touched(self, parameter: torch.Tensor) -> bool:
        """Something was added for the parameter since `clear`."""
        return id(parameter) in self._touched

    def take(self, unit: Unit) -> torch.Tensor:
        """The sums of a unit, zeros where there are none, which are no longer kept here; its parameters stay touched."""
        sums = self.sums.pop(unit.name, None)
        members = {id(self._weights.parameters[entry.name]) for entry in unit.entries}
        self._views = {key: view for key, view in self._views.items() if members.isdisjoint(key)}
        if sums is None:
            dtype = torch.promote_types(unit.dtype, torch.float32)
            sums = torch.zeros(unit.size, dtype=dtype, device=self._weights.flats[unit.name].device)
        return sums

    def complete(self, parameters: Iterable[torch.Tensor]) -> None:
        """Zeros for the parameters that have no sums yet: other ranks may have some."""
        for parameter in parameters:
            self.view(parameter)

    def clear(self) -> None:
        self.sums, self._views, self._touched = {}, {}, set()

    def _view(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        unit, entry = self._weights.place(parameters[0])
        if unit.name not in self.sums:
            dtype = torch.promote_types(unit.dtype, torch.float32)
            self.sums[unit.name] = torch.zeros(unit.size, dtype=dtype, device=parameters[0].device)
        total = self.sums[unit.name]
        if len(parameters) == 1:
            return entry.view(total)
        stretch = self._weights.stretch(parameters)
        assert stretch is not None, "only parameters that lie side by side have one sum"
        _, offset, shape = stretch
        return total[offset : offset + shape.numel()].view(shape)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b; on CUDA without rounding the product before it is added."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
