"""The driver's virtual memory: `cuda.bindings.driver` with addresses, physical memory behind them, and none behind lent ones."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

from emulated_cuda.operations import State
from emulated_cuda.patches import Patches

GRANULE = 2 * 2**20
OVERWRITTEN_BYTES = 8 * 2**20
"""Of fresh memory so much, at each end, is filled with garbage; what lies between is empty pages."""


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


@dataclass
class _Range:
    memory: mmap.mmap
    size: int
    mapped: dict[int, int] = field(default_factory=dict)
    accessible: bool = False


class Driver:
    def __init__(self, state: State) -> None:
        self._state = state
        self._ranges: dict[int, _Range] = {}
        self._kept: list[mmap.mmap] = []
        self.fail: dict[str, int] = {}
        """Calls that fail for lack of memory: after how many."""

    def reserve(self, size: int) -> tuple[Any, ...]:
        if size % GRANULE:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        memory = mmap.mmap(-1, size + GRANULE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        address = -(-address // 4096) * 4096
        self._ranges[address] = _Range(memory, size)
        self._state.lent[address] = "no memory is mapped there"
        return Result.CUDA_SUCCESS, address

    def free(self, address: int, size: int) -> tuple[Any, ...]:
        found = self._ranges.pop(address, None)
        if found is None or found.mapped or found.size != size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        self._kept.append(found.memory)  # an address that is used afterwards is told, and reads nothing else
        self._state.lent[address] = "its addresses are free"
        return (Result.CUDA_SUCCESS,)

    def create(self, size: int) -> tuple[Any, ...]:
        memory = self._state.memory
        refused = memory.refuse is not None and memory.refuse(size)
        if refused or memory.free < size:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        memory.arenas += size
        return Result.CUDA_SUCCESS, SimpleNamespace(size=size, mapped=False, released=False)

    def release(self, handle: Any) -> tuple[Any, ...]:
        if not handle.mapped:
            self._state.memory.arenas -= handle.size
        handle.released = True
        return (Result.CUDA_SUCCESS,)

    def map(self, at: int, size: int, handle: Any) -> tuple[Any, ...]:
        _, found = self._range(at)
        if handle.size != size or any(begin < at + size and at < begin + n for begin, n in found.mapped.items()):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        found.mapped[at] = size
        handle.mapped = True
        found.accessible = False
        return (Result.CUDA_SUCCESS,)

    def unmap(self, at: int, size: int) -> tuple[Any, ...]:
        address, found = self._range(at)
        if found.mapped.get(at) != size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        del found.mapped[at]
        self._state.memory.arenas -= size
        self._state.lent[address] = "its memory is lent"
        begin = at - ctypes.addressof(ctypes.c_char.from_buffer(found.memory))
        first = -(-begin // 4096) * 4096
        if size > 4096:
            found.memory.madvise(mmap.MADV_DONTNEED, first, size - 4096)
        self._overwrite(at, size)
        return (Result.CUDA_SUCCESS,)

    def set_access(self, address: int, size: int) -> tuple[Any, ...]:
        found = self._ranges[address]
        if sum(found.mapped.values()) < size:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        self._overwrite(address, size)
        self._state.lent.pop(address, None)
        return (Result.CUDA_SUCCESS,)

    def _overwrite(self, at: int, size: int) -> None:
        some = min(size, OVERWRITTEN_BYTES)
        ctypes.memset(at, 0xFF, some)
        ctypes.memset(at + size - some, 0xFF, some)

    def _range(self, at: int) -> tuple[int, _Range]:
        return next((begin, found) for begin, found in self._ranges.items() if begin <= at < begin + found.size)


def install(patches: Patches, state: State) -> Driver:
    driver = Driver(state)
    module = ModuleType("cuda.bindings.driver")
    success = (Result.CUDA_SUCCESS,)
    values = {
        "CUresult": Result,
        "CUmemAllocationProp": lambda: SimpleNamespace(location=SimpleNamespace()),
        "CUmemAccessDesc": lambda: SimpleNamespace(),
        "CUmemAllocationType": SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1),
        "CUmemLocationType": SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
        "CUmemAccess_flags": SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3),
        "CUmemAllocationGranularity_flags": SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0),
        "cuMemGetAllocationGranularity": lambda prop, flag: (*success, GRANULE),
        "cuMemAddressReserve": lambda size, alignment, address, flags: driver.reserve(size),
        "cuMemAddressFree": lambda address, size: driver.free(address, size),
        "cuMemCreate": lambda size, prop, flags: driver.create(size),
        "cuMemRelease": driver.release,
        "cuMemMap": lambda at, size, offset, handle, flags: driver.map(at, size, handle),
        "cuMemUnmap": driver.unmap,
        "cuMemSetAccess": lambda address, size, access, count: driver.set_access(address, size),
    }
    for name, value in values.items():
        setattr(module, name, value)
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    package.bindings, bindings.driver = bindings, module  # type: ignore[attr-defined]
    for name, found in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.driver", module)):
        patches.item(sys.modules, name, found)  # type: ignore[arg-type]
    return driver
