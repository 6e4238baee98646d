"""Bytes of tensors that are alive, whatever the device: every storage that an operation makes, until it is gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
IN_FLOAT32 = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""A CPU without instructions for bfloat16 takes fifty times as long for these. What they return is as large either way; what they
hold meanwhile is not counted."""


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation returns, in its own types."""
    if func not in IN_FLOAT32 or args[0].dtype != torch.bfloat16:
        return func(*args, **kwargs)
    wide = [a.float() if isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 else a for a in args]
    return tree_map(lambda out: out.bfloat16(), func(*wide, **kwargs))


class Live(TorchDispatchMode):
    """Counts in blocks of 512 bytes, as torch's allocator does on a GPU. Storages of `known` tensors count nothing."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = compute(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // 512) * 512
        if key in self._sizes or not size:
            return
        self._sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
