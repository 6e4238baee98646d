"""Host memory that a checkpoint is copied to, so that training goes on while the copy is written.

The memory is taken once and used for every checkpoint of a run: pages that are new cost several times what copying into old ones
does. For a CUDA device it is pinned. Whether all values are finite is found from sums: one pass that takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import torch

from trimtab.model.memory import Shortage, attempt, host_memory
from trimtab.model.transfer import HostMemory

ALIGNMENT = 512
"""Bytes: where a tensor's copy may begin."""
MIN_ROOM = 1.1
"""Times its size, which has to be free on the host before the memory is taken."""


class HostCopy:
    """Memory for copies of tensors that are on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: HostMemory | None = None

    def reserve(self, size: int) -> bool:
        """Have so many bytes, not pinned yet: any thread may do this. False, and nothing is taken, where the host has no room for
        them."""
        if self._memory is not None and self._memory.size >= size:
            return True
        self._memory = None
        if host_memory()[1] < MIN_ROOM * size:
            return False
        memory = attempt(lambda: HostMemory(size, self._device, pinned=False))
        if isinstance(memory, Shortage):
            return False
        memory.touch()
        self._memory = memory
        return True

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies, each laid out as the tensor is, in the memory that was reserved. Copies that were taken before are lost."""
        assert self._memory is not None
        self._memory.pin()
        copies, begin = [], 0
        for tensor in tensors:
            flat = self._memory.tensor((tensor.numel(),), tensor.dtype, begin)
            copies.append(flat.as_strided(tensor.shape, _stride(tensor)))
            begin += aligned(tensor.nbytes)
            if tensor.device.type == "cpu":
                _copy_on_host(copies[-1], tensor.detach())
            else:
                copies[-1].copy_(tensor.detach(), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies


def size_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes that copies of them take."""
    return sum(aligned(tensor.nbytes) for tensor in tensors.values())


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def may_be_not_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor's sum is not finite. If a value is not, the sum is not; if the sum is not, `is_finite` looks at each
    value. Asks a device once."""
    found = [False] * len(tensors)
    floats = [number for number, tensor in enumerate(tensors) if tensor.is_floating_point() and tensor.numel()]
    on_host = [number for number in floats if tensors[number].device.type == "cpu"]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        sums = list(zip(on_host, pool.map(lambda number: _sum_on_host(tensors[number].detach()), on_host)))
    devices = [number for number in floats if number not in set(on_host)]
    if devices:
        totals = torch.stack(
            [tensors[number].detach().sum(dtype=torch.float32).double() for number in devices]
        ).tolist()
        sums += zip(devices, totals)
    for number, total in sums:
        found[number] = not math.isfinite(total)
    return found


def is_finite(tensor: torch.Tensor) -> bool:
    """All of a tensor's values are numbers."""
    if not may_be_not_finite([tensor])[0]:
        return True
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor.detach(), math.inf)))  # a sum can overflow


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own where it has no holes, so that its copy is one stretch of memory."""
    dense = torch.empty_like(tensor, device="meta")  # keeps the strides of what is dense
    return tuple(dense.stride())


def _flat(tensor: torch.Tensor) -> Any:
    """A dense tensor's bytes, for numpy: torch would start threads beside those of the training."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8).numpy()


def _copy_on_host(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    if copy.stride() == tensor.stride() and tensor.numel():
        numpy.copyto(_flat(copy), _flat(tensor))
    else:
        copy.copy_(tensor)


def _sum_on_host(tensor: torch.Tensor) -> float:
    if tensor.dtype not in (torch.float32, torch.float64) or _stride(tensor) != tensor.stride():
        return float(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)))
    with numpy.errstate(all="ignore"):
        return float(_flat(tensor).view(numpy.float32 if tensor.dtype == torch.float32 else numpy.float64).sum())
