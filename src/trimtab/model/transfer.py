"""Numbers on their way to a device."""

from __future__ import annotations

import math
import weakref
from contextlib import suppress

import torch

from trimtab.base.units import GIB


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for what runs there: from pinned memory, which is kept until it is read."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class HostMemory:
    """Host memory of just the size asked for, pinned for a CUDA device as long as this object lives.

    torch's own pinned memory comes in powers of two, which is too much where it holds a model.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8)
        if device.type == "cuda" and size:
            code = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), size, 0))
            if code:
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)  # CUDA keeps the error, and would tell a later kernel of it
                raise MemoryError(f"{size / GIB:.1f} GiB of host memory could not be pinned (CUDA error {code})")
            weakref.finalize(self, _unpin, self._bytes).atexit = False

    @property
    def size(self) -> int:
        return self._bytes.numel()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The beginning of it as a tensor, pinned no longer than this object lives."""
        count = math.prod(shape)
        return self._bytes[: count * dtype.itemsize].view(dtype).view(shape)


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
