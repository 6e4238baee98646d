"""Float32 sums of the gradients of half-precision parameters over the micro-batches of a step.

The fused layers' and the head's products add to them directly, on a GPU without rounding to half precision in between; what
autograd makes (embeddings, the model's own modules) is added by hooks. Parameters that share a storage (parts.py joins those
that read one input) have gradients that share one in the same order, so one product fills them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Gradients:
    """Sums of gradients by parameter; they exist from the first one of a step until `clear`."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._ids = {id(parameter) for parameter in parameters}
        self._places: set[int] | None = None
        self._sums: dict[int, torch.Tensor] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The sum for a parameter, or for several that are one tensor; None for what is not among the parameters."""
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in self._sums:
            if at not in self._known_places():
                return None
            count = storage.nbytes() // tensor.element_size()
            self._sums[at] = torch.zeros(count, dtype=torch.float32, device=tensor.device)
        return self._view(tensor)

    def get(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The sum for a parameter; None where nothing has been added yet."""
        return self._view(parameter) if parameter.untyped_storage().data_ptr() in self._sums else None

    def add(self, parameter: torch.Tensor) -> None:
        """Take over a gradient that autograd made."""
        if parameter.grad is not None:
            total = self.of(parameter)
            assert total is not None
            total += parameter.grad
            parameter.grad = None

    def clear(self) -> None:
        self._sums, self._places = {}, None

    def _known_places(self) -> set[int]:
        """Addresses of the parameters' storages, looked up once a step: they may have been moved since the last."""
        if self._places is None:
            self._places = {parameter.untyped_storage().data_ptr() for parameter in self._parameters}
        return self._places

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        total = self._sums[tensor.untyped_storage().data_ptr()]
        return total.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a b; on CUDA without rounding the product before it is added."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
