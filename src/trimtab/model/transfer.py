"""Numbers on their way to a device, or from one."""

from __future__ import annotations

import ctypes
import math
import weakref
from contextlib import suppress

import torch

from trimtab.base.units import GIB


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for what runs there: from pinned memory, which is kept until it is read."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def host_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What is saved of a model, on the host, each tensor in a storage of its own, as libraries that save tensors want it: they
    would copy those that share one, on their device. What is on the host already is not copied; tied tensors stay tied."""
    named = model.state_dict(keep_vars=True)
    found = {id(value): apart(value.detach().cpu()) for value in named.values()}
    return {name: found[id(value)] for name, value in named.items()}


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the host as the whole of a storage, without a copy where its memory allows that."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes or not tensor.is_contiguous():
        return tensor
    return torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy()).view(tensor.dtype).view(tensor.shape)


class HostMemory:
    """Host memory of just the size asked for, pinned for a CUDA device as long as this object lives.

    torch's own pinned memory comes in powers of two, which is too much where it holds a model.
    """

    def __init__(self, size: int, device: torch.device, pinned: bool = True) -> None:
        """`pinned`: at once; otherwise when `pin` is called, by the thread that uses the device."""
        self._bytes = torch.empty(size, dtype=torch.uint8)
        self._device, self._is_pinned = device, False
        if pinned:
            self.pin()

    def pin(self) -> None:
        """Have it pinned, where there is a device to pin it for."""
        if self._is_pinned or self._device.type != "cuda" or not self.size:
            return
        code = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.size, 0))
        if code:
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # CUDA keeps the error, and would tell a later kernel of it
            raise MemoryError(f"CUDA cannot pin {self.size / GIB:.1f} GiB of host memory (error {code})")
        self._is_pinned = True
        weakref.finalize(self, _unpin, self._bytes).atexit = False

    @property
    def size(self) -> int:
        return self._bytes.numel()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, begin: int = 0) -> torch.Tensor:
        """Bytes of it, from `begin` on, as a tensor that is pinned no longer than this object lives."""
        count = math.prod(shape)
        return self._bytes[begin : begin + count * dtype.itemsize].view(dtype).view(shape)

    def touch(self) -> None:
        """Have the system give all of it now. A page that is written to for the first time costs more than copying into it."""
        ctypes.memset(self._bytes.data_ptr(), 0, self.size)  # without Python's lock


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
