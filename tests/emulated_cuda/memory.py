"""Memory of the played device: which storages lie on it, how much they take, and when there is no more.

Counts are torch's: `allocated` in blocks of 512 bytes, `reserved` what the allocator has taken from the device and keeps until
`empty_cache`, retries when it had to give back and ask again. Beside it the driver's own allocations (arenas) and the context.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

BLOCK = 512
CONTEXT_BYTES = 64 * 2**20
"""What a process takes of the device before it has allocated anything."""


class DeviceMemory:
    """One device. Tests set what is too much, or which allocation fails."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.fraction = 1.0
        self.allocated = self.peak = self.reserved = self.peak_reserved = 0
        self.arenas = 0
        self.retries = self.ooms = self.allocations = 0
        self.others = 0
        """Bytes that other processes hold."""
        self.refuse: Callable[[int], bool] | None = None
        """Asked at every allocation with its bytes; True lets it fail."""
        self._lock = threading.RLock()
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.foreign: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages on the device that torch's allocator does not know of."""

    def holds(self, tensor: torch.Tensor) -> bool:
        try:
            key = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # meta, or a wrapper without memory
            return False
        return key in self._held or key in self.foreign

    def hold(self, tensor: torch.Tensor) -> None:
        """The tensor's storage lies on the device from now on; raises where there is no room for it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._held or key in self.foreign:
                return
            nbytes = -(-storage.nbytes() // BLOCK) * BLOCK
            self._take(nbytes)
            self._held[key] = (weakref.ref(storage, lambda _: self._drop(key)), nbytes)

    def hold_foreign(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.foreign[key] = weakref.ref(storage, lambda _: self.foreign.pop(key, None))

    def resized(self, tensor: torch.Tensor) -> None:
        """The tensor's storage has another size now (`resize_`, `UntypedStorage.resize_`)."""
        key = tensor.untyped_storage()._cdata
        with self._lock:
            if key in self._held:
                reference, before = self._held[key]
                now = -(-tensor.untyped_storage().nbytes() // BLOCK) * BLOCK
                self.allocated -= before
                self._held[key] = (reference, 0)
                self._take(now)
                self._held[key] = (reference, now)

    def _drop(self, key: int) -> None:
        with self._lock:
            self.allocated -= self._held.pop(key)[1]

    def _take(self, nbytes: int) -> None:
        self.allocations += 1
        if self.refuse is not None and nbytes and self.refuse(nbytes):
            self._fail(nbytes)
        if self.allocated + nbytes > self.reserved:
            if self.allocated + nbytes > self._limit() and self.reserved > self.allocated:
                self.retries += 1
                self.reserved = self.allocated
            if self.allocated + nbytes > self._limit():
                self._fail(nbytes)
            self.reserved = self.allocated + nbytes
        self.allocated += nbytes
        self.peak, self.peak_reserved = max(self.peak, self.allocated), max(self.peak_reserved, self.reserved)

    def _limit(self) -> int:
        return min(int(self.fraction * self.total), self.total - CONTEXT_BYTES - self.arenas - self.others)

    def _fail(self, nbytes: int) -> None:
        self.ooms += 1
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {nbytes} bytes. GPU 0 has a total capacity of {self.total} bytes of which "
            f"{self.free} are free (emulated)."
        )

    @property
    def free(self) -> int:
        return max(0, self.total - CONTEXT_BYTES - self.reserved - self.arenas - self.others)

    def empty_cache(self) -> None:
        with self._lock:
            self.reserved = self.allocated

    def reset_peaks(self) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def fail_allocation(self, number: int, at_least: int = 0) -> None:
        """The `number`th allocation of `at_least` bytes from now on fails, once."""
        left = number

        def refuse(nbytes: int) -> bool:
            nonlocal left
            if nbytes < at_least or left <= 0:
                return False
            left -= 1
            return left == 0

        self.refuse = refuse
