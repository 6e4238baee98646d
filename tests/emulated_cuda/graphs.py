"""CUDA graphs: the operations and launches of a step, done again on the same addresses.

As on a GPU, recording changes nothing: what it wrote to memory from before is put back. What was allocated while recording lives
as long as the graph; anything else is known by its address only, and gone memory is an error when the graph is replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

MOST_PUT_BACK_BYTES = 32 * 2**20
"""Larger pieces, such as all keys and values, stay as the recording left them."""


@dataclass(frozen=True)
class Address:
    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        storage = self.storage()
        if storage is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered (a graph's memory is gone)")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass
class Graph:
    memory: Any
    check: Callable[[torch.Tensor], None]
    steps: list[Callable[[], None]] = field(default_factory=list)
    own: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    before_values: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    invalid: str = ""
    ended: bool = False

    def keep(self, value: Any) -> Any:
        return tree_map_only(torch.Tensor, self._keep, value)

    def _keep(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata in self.own or not self.memory.holds(tensor):
            return tensor.detach()
        return Address(weakref.ref(storage), tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def given(self, value: Any) -> Any:
        found = tree_map_only(Address, Address.tensor, value)
        for x in tree_flatten(found)[0]:
            if isinstance(x, torch.Tensor):
                self.check(x)
        return found

    def before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note what an operation is about to overwrite."""
        if not func._schema.is_mutable:
            return
        named = {a.name: a for a in func._schema.arguments}
        values = {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
        for name, value in values.items():
            info = named[name].alias_info
            if info is not None and info.is_write:
                self.note([x for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor)])

    def note(self, tensors: list[torch.Tensor]) -> None:
        for x in tensors:
            storage = x.untyped_storage()
            key = (storage._cdata, x.storage_offset(), x.size(), x.stride(), x.dtype)
            if storage._cdata not in self.own and key not in self.before_values and x.nbytes <= MOST_PUT_BACK_BYTES:
                self.before_values[key] = (x.detach(), x.detach().clone())

    def add(self, func: Any, work: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        outs = [x for x in tree_flatten(found)[0] if isinstance(x, torch.Tensor)]
        ins = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage()._cdata for x in ins}
        fresh = [x for x in outs if x.untyped_storage()._cdata not in known]
        for x in fresh:
            self.own[x.untyped_storage()._cdata] = x.untyped_storage()
        if not fresh and not func._schema.is_mutable:
            return  # a view
        kept_args, kept_kwargs = self.keep(args), self.keep(kwargs)
        kept = [x.detach() for x in outs] if fresh else []

        def step() -> None:
            again = work(*self.given(kept_args), **self.given(kept_kwargs))
            for old, new in zip(kept, (x for x in tree_flatten(again)[0] if isinstance(x, torch.Tensor))):
                old.copy_(new)

        self.steps.append(step)

    def launch(self, do: Callable[[Any, Any], None], args: Any, kwargs: Any) -> None:
        kept_args, kept_kwargs = self.keep(args), self.keep(kwargs)
        self.steps.append(lambda: do(self.given(kept_args), self.given(kept_kwargs)))

    def end(self) -> None:
        for where, what in reversed(self.before_values.values()):
            where.copy_(what)
        self.before_values.clear()
        self.ended = True

    def replay(self) -> None:
        for step in self.steps:
            step()
