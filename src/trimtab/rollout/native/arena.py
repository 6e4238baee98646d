"""Device memory that can be lent and taken back at the same addresses, so that CUDA graphs captured over it stay valid.

An arena reserves a range of addresses once and keeps it until `close`. `lend` takes the physical memory out from behind it and
gives that to the driver, for anyone to use; `reclaim` puts fresh memory behind the same addresses, with undefined contents.
Guaranteed, whichever driver call fails: the tensors' addresses never change; memory is behind all of the range or the arena
says it is not `mapped`; a failed `reclaim` leaves nothing behind and can be tried again. Touching a tensor of an arena that is
lent or closed is an illegal memory access. Without `close`, memory goes when the arena and its last tensor are gone.

Why nothing leaks: a handle to physical memory lives only until it is mapped; from then on the mapping alone owns the memory.
Mappings fill the range from the front and are taken away from the back, so one number, `backed`, says all there is to undo.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.base.errors import EngineError
from trimtab.base.units import GIB

ALIGNMENT = 256


class ArenaMemoryError(EngineError, torch.OutOfMemoryError):
    """The device has too little free memory; caught as torch's own out-of-memory error too."""


def piece_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """What `Arena.tensor` takes for such a tensor: an arena of the sum of its pieces holds them all."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Arena:
    """Tensors carved one after the other out of one stretch of memory. On a CPU, or without cuda-bindings, it is never lent."""

    def __init__(self, nbytes: int, device: torch.device, driver: CudaDriver | None = None) -> None:
        assert nbytes > 0
        self.nbytes = nbytes
        self.not_lendable = "" if driver else why_not_lendable(device)
        """Why this memory cannot be lent; empty where it can."""
        self._used = 0
        self._pages: _Pages | None = None
        if self.not_lendable:
            self._bytes: torch.Tensor | None = torch.empty(nbytes, dtype=torch.uint8, device=device)
        else:
            self._pages = _Pages(nbytes, driver or CudaDriver(device))
            source = _ArraySource(self._pages.address, nbytes)
            weakref.finalize(source, self._pages.close).atexit = False
            self._bytes = self._pages.driver.view(source)
            assert self._bytes.data_ptr() == self._pages.address, "torch copied the arena instead of viewing it"

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next piece, contiguous, aligned to 256 bytes from the start of the arena, contents undefined."""
        assert self._bytes is not None, "the arena is closed"
        start, end = self._used, self._used + math.prod(shape) * dtype.itemsize
        assert end <= self.nbytes, f"{tuple(shape)} of {dtype} ends at byte {end} of an arena of {self.nbytes}"
        self._used += piece_bytes(shape, dtype)
        return self._bytes[start:end].view(dtype).view(tuple(shape))

    @property
    def lendable(self) -> bool:
        return not self.not_lendable

    @property
    def mapped(self) -> bool:
        """Whether its tensors may be touched."""
        return self._bytes is not None and (self._pages is None or self._pages.mapped)

    def lend(self) -> int:
        """Wait for the device, then free the physical memory. Returns the bytes freed: 0 if lent already, or not lendable."""
        assert self._bytes is not None, "the arena is closed"
        return self._pages.unmap() if self._pages else 0

    def reclaim(self) -> None:
        """Put memory behind the addresses again. Raises ArenaMemoryError where there is too little; it can be tried again."""
        assert self._bytes is not None, "the arena is closed"
        if self._pages and not self._pages.mapped:
            self._pages.map()

    def close(self) -> None:
        """Free memory and addresses. No tensor of a lendable arena may be touched from here on."""
        if self._pages:
            self._pages.close()
        self._bytes = None


class _ArraySource:
    """What torch makes a tensor of bytes from (the interface has no bfloat16); every tensor of the arena keeps it alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class _Pages:
    """A reserved address range whose first `backed` bytes have physical memory; `mapped` once all have and may be used."""

    def __init__(self, nbytes: int, driver: CudaDriver) -> None:
        assert driver.chunk_bytes % driver.granule == 0
        self.driver = driver
        self.nbytes = -(-nbytes // driver.granule) * driver.granule
        self.backed = 0
        self.mapped = False
        self.closed = False
        self.address = driver.reserve(self.nbytes)
        try:
            self.map()
        except BaseException:
            self.close()
            raise

    def map(self) -> None:
        try:
            self._map()
        except ArenaMemoryError:
            self.driver.empty_cache()  # freed tensors' memory is still torch's; the driver can have it
            self._map()

    def _map(self) -> None:
        try:
            while self.backed < self.nbytes:
                self._back(min(self.driver.chunk_bytes, self.nbytes - self.backed))
            self.driver.set_access(self.address, self.nbytes)
        except ArenaMemoryError as error:
            self._unback()
            wanted, free = self.nbytes / GIB, self.driver.free_bytes() / GIB
            raise ArenaMemoryError(
                f"the rollout needs {wanted:.2f} GiB, but the device has {free:.2f} GiB free ({error}). "
                "Free device memory, or lower run.rollout.kv_memory"
            ) from error
        except BaseException:
            self._unback()
            raise
        self.mapped = True

    def _back(self, nbytes: int) -> None:
        handle = self.driver.create(nbytes)
        try:
            self.driver.map(self.address + self.backed, nbytes, handle)
            self.backed += nbytes
        finally:
            self.driver.release(handle)  # a mapping, where one was made, keeps the memory

    def unmap(self) -> int:
        before = self.backed
        if before:
            self.driver.synchronize()
            self._unback()
        return before

    def _unback(self) -> None:
        self.mapped = False
        while self.backed:
            start = (self.backed - 1) // self.driver.chunk_bytes * self.driver.chunk_bytes
            self.driver.unmap(self.address + start, self.backed - start)
            self.backed = start

    def close(self) -> None:
        if not self.closed:
            self.unmap()
            self.driver.free(self.address, self.nbytes)
            self.closed = True


def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


def why_not_lendable(device: torch.device) -> str:
    """Why memory of this device cannot be lent; empty where it can."""
    if device.type != "cuda":
        return f"memory of a {device.type} device is not lent"
    try:
        _bindings()
    except ImportError as error:
        return f"the package cuda-bindings cannot be imported ({error})"
    return ""


class CudaDriver:
    """The driver's virtual memory calls for one device, each checked, and the little of torch that belongs with them."""

    chunk_bytes = 512 << 20
    """Physical memory comes in pieces of this size: small enough to undo, large enough that calls are few."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(1, device=device).device  # has an index, and torch's context exists from here on
        self._cu = cu = _bindings()
        self._memory = cu.CUmemAllocationProp()
        self._memory.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._memory.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._memory.location.id = self.device.index
        self._access = cu.CUmemAccessDesc()
        self._access.location = self._memory.location
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        smallest = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(self._call("cuMemGetAllocationGranularity", self._memory, smallest)[0])

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        with torch.cuda.device(self.device):
            code, *values = getattr(self._cu, name)(*arguments)
        if code == self._cu.CUresult.CUDA_SUCCESS:
            return values
        short = code == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        raise (ArenaMemoryError if short else EngineError)(f"{name} on {self.device} gave {code.name}")

    def reserve(self, nbytes: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0)[0])

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        return self._call("cuMemCreate", nbytes, self._memory, 0)[0]

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int) -> None:
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def view(self, source: _ArraySource) -> torch.Tensor:
        return torch.as_tensor(source, device=self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]
