"""Where the parameters of a model lie that ranks hold in parts (`run.shard: full`).

FSDP2 cuts a matrix by rows: rank r of N has rows [r·c, (r+1)·c) with c = rows / N, rounded up; the last ranks may have fewer, or
none. What an optimizer steps is this part, as a parameter of its own (`parameters`), in a unit of its own that bears the
parameter's name: elements [first, first + count) of the whole, in the order in which they lie in memory. What FSDP2 does not cut
(vectors, adapters, value heads) is whole on every rank and lies in units as elsewhere (weights.py).

Guarantee: parts are views of FSDP2's own memory, so what is written to them is gathered in the next pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from trimtab.model.weights import Unit, UnitEntry, WeightStore


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which this rank has some rows."""

    name: str
    whole: torch.nn.Parameter
    """As the model has it outside of a pass: a DTensor. FSDP2 puts its gradient there."""
    part: torch.nn.Parameter
    """This rank's rows."""
    first: int
    """Elements of the whole that come before this rank's."""
    dtype: torch.dtype
    """What passes compute in; the part has its masters' type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(self.whole.shape)

    @property
    def row_elements(self) -> int:
        return self.whole.shape[1:].numel()


class ShardStore(WeightStore):
    """See weights.py. `sharded` has the parameters that are held in parts, those of which this rank has nothing included."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, shard: int, shards: int) -> None:
        """`dtype`: what passes compute in. This rank has part number `shard` of `shards`."""
        named = dict(model.named_parameters())
        super().__init__((name, p) for name, p in named.items() if not isinstance(p.data, DTensor))
        self.sharded: dict[str, ShardedParameter] = {}
        for name, whole in named.items():
            if isinstance(whole.data, DTensor):
                self.sharded[name] = _sharded(name, whole, dtype, shard, shards)
        self._by_id = {id(one.whole): one for one in self.sharded.values()}
        units = {}
        for one in self.sharded.values():
            part = one.part
            if part.numel():
                entry = UnitEntry(one.name, tuple(part.shape), tuple(part.stride()), 0)
                unit = units[one.name] = Unit(one.name, part.dtype, (entry,), part.numel())
                self.parameters[one.name] = part
                self.flats[one.name] = part.data.view(-1)
                self._places[id(part)] = (unit, entry)
        self.units = (*self.units, *units.values())

    def is_sharded(self, unit: Unit) -> bool:
        """Ranks hold this unit in parts."""
        return unit.name in self.sharded

    @torch.no_grad()
    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A collective where ranks hold the tensor in parts: all of them ask for the same ones in the same order."""
        one = self._by_id.get(id(tensor))
        return tensor if one is None else one.whole.data.to(one.dtype).full_tensor()  # type: ignore[attr-defined]

    def put(self, unit: Unit, flat: torch.Tensor) -> None:
        assert not hasattr(self, "sharded") or not self.is_sharded(unit), "FSDP2 says where its parts lie"
        super().put(unit, flat)

    def is_of(self, model: torch.nn.Module) -> bool:
        named = dict(model.named_parameters())
        whole = {name: p for name, p in named.items() if not isinstance(p.data, DTensor)}
        own = {name: p for name, p in self.parameters.items() if name not in self.sharded}
        if whole.keys() != own.keys() or any(p is not own[name] for name, p in whole.items()):
            return False
        return all(named.get(name) is one.whole for name, one in self.sharded.items())


@torch.no_grad()
def _sharded(name: str, whole: torch.nn.Parameter, dtype: torch.dtype, shard: int, shards: int) -> ShardedParameter:
    local = whole.data.to_local()  # type: ignore[attr-defined]
    rows = first_row(whole.shape, shard, shards)
    assert local.shape[0] == first_row(whole.shape, shard + 1, shards) - rows, f"{name} is not cut by rows"
    part = torch.nn.Parameter(local, requires_grad=whole.requires_grad)
    working = dtype if whole.requires_grad else local.dtype
    return ShardedParameter(name, whole, part, rows * whole.shape[1:].numel(), working)


def first_row(shape: Sequence[int], shard: int, shards: int) -> int:
    """The first row that a rank has of a parameter."""
    each = -(-shape[0] // shards)
    return min(shard * each, shape[0])


@torch.no_grad()
def whole_tensors(
    named: Mapping[str, torch.Tensor], wanted: Collection[str], store: WeightStore | None = None
) -> dict[str, torch.Tensor]:
    """The tensors that are wanted, as they are. Those that ranks hold in parts are whole, on the host and in the type that passes
    compute in (without a store, in that of their masters); then all ranks call this, each with its own wishes. Tied ones stay one
    object."""
    found: dict[int, torch.Tensor] = {}
    mine = {id(named[name]) for name in wanted}
    for value in named.values():
        if id(value) not in found and isinstance(value.data, DTensor):
            whole = value.data.full_tensor() if store is None else store.whole(value)
            found[id(value)] = whole.cpu() if id(value) in mine else whole.new_empty(0)
    return {name: found.get(id(named[name]), named[name]) for name in named if name in wanted}
