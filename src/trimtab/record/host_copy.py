"""Host memory that a checkpoint is copied to, so that training goes on while the copy is written.

The memory is taken once and used for every checkpoint of a run: pages that are new cost several times what copying into old ones
does. For a CUDA device it is pinned. On the CPU, values are looked at while they are in the cache on their way: refusing what is
not finite costs little beside the copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch

from trimtab.model.memory import Shortage, attempt, host_memory
from trimtab.model.transfer import HostMemory

ALIGNMENT = 512
"""Bytes: where a tensor's copy may begin."""
IN_CACHE = 2**17
"""Elements that are copied and looked at together."""
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

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
        """Copies, each laid out as the tensor is, in the memory that was reserved; and whether each may hold values that are not
        finite. Copies that were taken before are lost."""
        assert self._memory is not None
        self._memory.pin()
        copies, begin = [], 0
        for tensor in tensors:
            flat = self._memory.tensor((tensor.numel(),), tensor.dtype, begin)
            copies.append(flat.as_strided(tensor.shape, _stride(tensor)))
            begin += aligned(tensor.nbytes)
        if self._device.type != "cpu":
            suspects = may_be_not_finite(tensors)
            for copy, tensor in zip(copies, tensors):
                copy.copy_(tensor, non_blocking=True)
            torch.cuda.synchronize(self._device)
            return copies, suspects
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return copies, list(pool.map(_copy_and_look, copies, tensors))


def size_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes that copies of them take."""
    return sum(aligned(tensor.nbytes) for tensor in tensors.values())


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def may_be_not_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor's sum is not finite. If a value is not, the sum is not; if the sum is not, `is_finite` looks at each
    value. Takes no memory beside the tensors, and asks each device once."""
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.is_floating_point() and tensor.numel():
            sums.setdefault(tensor.device, []).append((number, tensor.detach().sum(dtype=_wide(tensor))))
    found = [False] * len(tensors)
    for items in sums.values():
        values = torch.stack([total.double() for _, total in items]).tolist()
        for (number, _), value in zip(items, values):
            found[number] = not math.isfinite(value)
    return found


def is_finite(tensor: torch.Tensor) -> bool:
    """All of a tensor's values are numbers."""
    if not may_be_not_finite([tensor])[0]:
        return True
    return bool(torch.isfinite(torch.linalg.vector_norm(tensor.detach(), math.inf)))  # a sum can overflow


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own where it has no holes, so that its copy is one stretch of memory."""
    dense = torch.empty_like(tensor, device="meta")  # keeps the strides of what is dense
    return tuple(dense.stride())


def _copy_and_look(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Copy between two tensors of the host. True where the sum of the values is not finite."""
    if copy.stride() != tensor.stride() or tensor.dtype not in (torch.float32, torch.float64):
        copy.copy_(tensor.detach())
        return may_be_not_finite([copy])[0]
    count = tensor.numel()
    to, source = (t.detach().as_strided((count,), (1,), t.storage_offset()).numpy() for t in (copy, tensor))
    total = 0.0
    with numpy.errstate(all="ignore"):  # numpy: torch would start threads of its own in each of the pool's
        for begin in range(0, count, IN_CACHE):
            part = to[begin : begin + IN_CACHE]
            numpy.copyto(part, source[begin : begin + IN_CACHE])
            total += float(part.sum())
    return not math.isfinite(total)
