"""Memory of a device that two processes see: an allocation's handle from one, opened by the other, through the CUDA driver.

The driver's own calls, so that the two may run different versions of torch. Nothing counts who uses the memory: who exports it
keeps it where it is, and says when it may be read.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

HANDLE_BYTES = 64
_LAZY_PEERS = 1


class NotShared(Exception):
    """This memory, or memory between these processes, cannot be shared."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def export(pointer: int) -> tuple[bytes, int]:
    """The handle of the allocation that an address lies in, and how many bytes into it."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.reserved), pointer - base.value


class OpenedAllocations:
    """Allocations of another process, by handle; each is opened once and closed when it is no longer named."""

    def __init__(self) -> None:
        self._pointers: dict[bytes, int] = {}

    def only(self, handles: tuple[bytes, ...]) -> None:
        """These are open, and no others."""
        for handle in handles:
            if handle not in self._pointers:
                pointer = ctypes.c_uint64()
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEERS)
                self._pointers[handle] = pointer.value
        for handle in self._pointers.keys() - set(handles):
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(self._pointers.pop(handle)))

    def bytes_of(self, handle: bytes, offset: int, count: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(self._pointers[handle] + offset, count), device="cuda")


class _Bytes:
    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (pointer, False), "version": 3}


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotShared(str(error)) from error


def _have_context() -> None:
    """The driver wants the calling thread to have the device's."""
    torch.cuda.current_stream().query()


def _call(name: str, *arguments: Any) -> None:
    _have_context()
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise NotShared(f"{name} failed with CUDA error {code}")
