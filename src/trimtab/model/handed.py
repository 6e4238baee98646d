"""Float32 gradients handed over to FSDP2, without rounding to half precision in between.

FSDP2 has a place for gradients that are wider than the weights: `unsharded_accumulated_grad`. What lies there when a unit's
backward pass ends is summed over ranks, with what autograd found added to it. The products of the head and of the fused layers
add to it directly, as they add to the sums of a step elsewhere (gradients.py).

It is a private name of torch: where there is none of that name, nothing is handed over and autograd's gradients serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from trimtab.model.gradients import Gradients
from trimtab.model.versions import fsdp_groups
from trimtab.model.weights import WeightStore


class Handed:
    """The parameters of FSDP2's units while they are gathered."""

    def __init__(self, units: Sequence[Any]) -> None:
        self._units = units
        self._known: dict[int, Any] = {}
        """By the id of a gathered parameter, which lives as long as its unit."""
        self._count = sum(1 for _ in self._parameters())

    def _parameters(self) -> Iterator[Any]:
        for unit in self._units:
            for group in fsdp_groups(unit):
                yield from group.fsdp_params

    def find(self, parameter: torch.Tensor) -> Any | None:
        """What FSDP2 has for a trained parameter that is gathered now; None for others."""
        if id(parameter) not in self._known and len(self._known) < self._count:
            names = ("_unsharded_param", "unsharded_accumulated_grad")
            gathered = (one for one in self._parameters() if all(hasattr(one, name) for name in names))
            self._known = {id(one._unsharded_param): one for one in gathered}
        found = self._known.get(id(parameter))
        return found if found is not None and found.sharded_param.requires_grad else None

    def clear(self) -> None:
        """Forget gradients that were not summed over ranks yet."""
        for one in self._parameters():
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None


class HandedGradients(Gradients):
    """See gradients.py. Parameters that ranks have whole have sums here; gradients of the others are handed over."""

    def __init__(self, weights: WeightStore, parameters: Iterable[torch.Tensor], handed: Handed) -> None:
        super().__init__(weights, parameters)
        self._handed = handed

    def __contains__(self, parameter: object) -> bool:
        if super().__contains__(parameter):
            return True
        return isinstance(parameter, torch.Tensor) and self._handed.find(parameter) is not None

    def of(self, *parameters: torch.Tensor) -> torch.Tensor | None:
        found = [self._handed.find(parameter) for parameter in parameters]
        first = next((one for one in found if one is not None), None)
        if first is None:
            return super().of(*parameters)
        if len(parameters) == 1 and first.unsharded_accumulated_grad is not None:
            known: torch.Tensor = first.unsharded_accumulated_grad
            return known
        rows = [parameter.shape[0] for parameter in parameters]
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        total = torch.zeros((sum(rows), *parameters[0].shape[1:]), dtype=dtype, device=parameters[0].device)
        for one, part in zip(found, total.split(rows)):
            if one is not None:
                if one.unsharded_accumulated_grad is not None:
                    part += one.unsharded_accumulated_grad
                one.unsharded_accumulated_grad = part
        return total  # not kept here: it is FSDP2's, until the unit's backward pass ends
