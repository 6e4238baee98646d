"""Float32 sums of the gradients of half-precision parameters over the micro-batches of a step.

The fused layers' and the head's products add to them directly, on a GPU without rounding to half precision in between; what
autograd makes (embeddings, the model's own modules) is added by hooks. The sums of a unit have the layout of its weights
(weights.py), so one product fills those of projections that are joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.model.weights import WeightStore


class Gradients:
    """Sums of gradients by unit; a unit's exist from its first gradient of a step until `clear`."""

    def __init__(self, weights: WeightStore, parameters: Sequence[torch.Tensor]) -> None:
        """`parameters`: those of the store whose gradients are summed here."""
        self._weights = weights
        self._ids = {id(parameter) for parameter in parameters}
        self._sums: dict[str, torch.Tensor] = {}
        """By unit."""
        self._touched: set[int] = set()
        """Parameters that have a gradient; the others of their unit have zeros that mean nothing."""

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def of(self, *parameters: torch.Tensor) -> torch.Tensor | None:
        """The sum to add to for a parameter, or for several that are joined; None where they are not summed here."""
        if not all(parameter in self for parameter in parameters):
            return None
        if len(parameters) == 1:
            unit, entry = self._weights.place(parameters[0])
            view = entry.view(self._sum(unit.name, unit.size, parameters[0].device))
        else:
            stretch = self._weights.stretch(parameters)
            assert stretch is not None, "only parameters that lie side by side have one sum"
            unit, offset, shape = stretch
            total = self._sum(unit.name, unit.size, parameters[0].device)
            view = total[offset : offset + shape.numel()].view(shape)
        self._touched.update(map(id, parameters))
        return view

    def _sum(self, unit: str, size: int, device: torch.device) -> torch.Tensor:
        if unit not in self._sums:
            self._sums[unit] = torch.zeros(size, dtype=torch.float32, device=device)
        return self._sums[unit]

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The sum for a parameter; None where nothing has been added yet."""
        if id(parameter) not in self._touched:
            return None
        unit, entry = self._weights.place(parameter)
        return entry.view(self._sums[unit.name])

    def add(self, parameter: torch.Tensor) -> None:
        """Take over a gradient that autograd made."""
        if parameter.grad is not None:
            total = self.of(parameter)
            assert total is not None
            total += parameter.grad
            parameter.grad = None

    def clear(self) -> None:
        self._sums, self._touched = {}, set()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b; on CUDA without rounding the product before it is added."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
