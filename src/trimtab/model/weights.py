"""The weight store: where every parameter of a model lies, and the one table that says so.

A *unit* is a stretch of memory that is summed, stepped, sent and saved as a whole: the matrices of one decoder layer, the
embedding, the head, all adapters, or all vectors (norms and biases). Its parameters are views of one flat tensor:

    unit model.layers.3        [ q_proj | k_proj | v_proj | o_proj | pad | gate_proj | up_proj | down_proj | pad ]
                                 `-------- joined --------'                `------ joined ------'

Guarantees:
- Projections that read the same input lie side by side, so that they are one matrix (`joined`).
- Everything else begins at a multiple of `BLOCK` elements, and a unit's length is a multiple of `BLOCK` times the number of
  ranks: any rank's share begins and ends on a block, so blocks of 8-bit optimizer state are the same for any number of ranks.
- Parameters that are trained are not in one unit with frozen ones (unless they are joined), nor with those of another type or
  device: sums and state are made for whole units.
- Gradient sums have the layout of the weights, and optimizer state and checkpoints name the unit and the offset: nothing is
  found by its address.
- Making a store moves values one unit at a time and keeps none twice; what lies in its place already is not moved.

Any model has a store: the names of its parameters say what is a layer, and a name without a number is a unit of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from trimtab.base.errors import ModelError
from trimtab.model.sizes import BLOCK

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module that read the same input, in the order in which their rows are stacked."""
VECTORS, ADAPTERS = "vectors", "adapters"


@dataclass(frozen=True)
class UnitEntry:
    """A parameter's place in its unit."""

    name: str
    """As `named_parameters` has it."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """A dense layout of the shape, in whatever order of dimensions."""
    offset: int
    """Elements from the beginning of the unit."""

    @property
    def count(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        return self.offset + self.count

    def view(self, flat: torch.Tensor, offset: int | None = None) -> torch.Tensor:
        """This parameter's part of a flat tensor that is laid out as the unit is, or that has the parameter at `offset`."""
        begin = self.offset if offset is None else offset
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + begin)


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a flat tensor of its unit: a row of a checkpoint's table."""

    unit: str
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """The parameter's, as `bfloat16`."""
    offset: int
    """Elements from the beginning of the flat tensor."""


@dataclass(frozen=True)
class Unit:
    """Parameters of one type that lie in one flat tensor."""

    name: str
    dtype: torch.dtype
    entries: tuple[UnitEntry, ...]
    size: int
    """Elements, the padding at its end included."""

    @property
    def decayed(self) -> bool:
        """Its parameters are matrices, so weight decay applies to them."""
        return all(len(entry.shape) >= 2 for entry in self.entries)


class WeightStore:
    """The units of named parameters. Making it moves the parameters into their units, one unit at a time."""

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], ranks: int = 1) -> None:
        self.parameters = {name: p for name, p in named_parameters if _has_place(name, p)}
        """By name; tied parameters once."""
        self._same = _sharing_memory(self.parameters)
        owners = {name: p for name, p in self.parameters.items() if name not in self._same}
        self.units = _units(owners, BLOCK * ranks)
        self.flats: dict[str, torch.Tensor] = {}
        """By unit: the memory that its parameters are views of."""
        places = {entry.name: (unit, entry) for unit in self.units for entry in unit.entries}
        self._places = {id(p): places[self._same.get(name, name)] for name, p in self.parameters.items()}
        for unit in self.units:
            self.put(unit, self._flat_of(unit))

    @torch.no_grad()
    def _flat_of(self, unit: Unit) -> torch.Tensor:
        """A unit's parameters in one flat tensor: their own memory where they lie so already, or a copy."""
        first = self.parameters[unit.entries[0].name]
        if first.storage_offset() == 0 and first.untyped_storage().nbytes() == unit.size * unit.dtype.itemsize:
            whole = first.data.as_strided((unit.size,), (1,), 0)
            if all(_is_view(self.parameters[entry.name], entry, whole) for entry in unit.entries):
                return whole
        flat = torch.zeros(unit.size, dtype=unit.dtype, device=first.device)
        for entry in unit.entries:
            entry.view(flat).copy_(self.parameters[entry.name])
        return flat

    def put(self, unit: Unit, flat: torch.Tensor) -> None:
        """From now on the unit's parameters are views of `flat`, which holds their values or is about to."""
        self.flats[unit.name] = flat
        for entry in unit.entries:
            self.parameters[entry.name].data = entry.view(flat)
        for name, owner in self._same.items():
            place, entry = self.place(self.parameters[owner])
            if place is unit:
                self.parameters[name].data = entry.view(flat)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._places

    def place(self, parameter: torch.Tensor) -> tuple[Unit, UnitEntry]:
        return self._places[id(parameter)]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the model, whole and in the type that passes compute in (shard_store.py)."""
        return tensor

    def joined(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The weights of several parameters as one matrix (or vector), first to last; None where they do not lie side by side."""
        stretch = self.stretch(parameters)
        if stretch is None:
            return None
        unit, offset, shape = stretch
        return self.flats[unit.name][offset : offset + shape.numel()].view(shape)

    def stretch(self, parameters: Sequence[torch.Tensor]) -> tuple[Unit, int, torch.Size] | None:
        """Where they lie side by side: their unit, the first one's offset, and the shape of all, stacked by rows."""
        unit, first = self.place(parameters[0])
        end, rows = first.offset, 0
        for parameter in parameters:
            own, entry = self.place(parameter)
            if own is not unit or entry.offset != end or entry.stride != _contiguous(entry.shape):
                return None
            end, rows = entry.end, rows + entry.shape[0]
        return unit, first.offset, torch.Size((rows, *first.shape[1:]))

    def is_of(self, model: torch.nn.Module) -> bool:
        """False if the model's parameters are no longer views of the store, because code has replaced or moved one (`model.to`,
        `load_state_dict(assign=True)`, new adapters)."""
        named = {name: p for name, p in model.named_parameters() if _has_place(name, p)}
        if named.keys() != self.parameters.keys() or any(p is not self.parameters[name] for name, p in named.items()):
            return False
        places = ((p, *self.place(p)) for p in named.values())
        return all(_is_view(p, entry, self.flats[unit.name]) for p, unit, entry in places)


def _has_place(name: str, parameter: torch.Tensor) -> bool:
    """True for plain tensors of floats. What a library has quantised, or wraps in a type of its own, stays where it is."""
    plain = type(parameter.data) is torch.Tensor and parameter.layout is torch.strided
    if plain and parameter.is_floating_point():
        return True
    if parameter.requires_grad:
        raise ModelError(
            f"{name} is a {type(parameter.data).__name__} of {parameter.dtype}, which cannot be trained. Freeze it, or train "
            "adapters (model.lora)."
        )
    return False


def _sharing_memory(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Parameters that are the same memory as one before them, and that one's name: tied without being one object."""
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for name, parameter in named.items():
        memory = (parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.shape, parameter.stride())
        owner = first.setdefault(memory, name) if parameter.numel() else name
        if owner != name:
            found[name] = owner
    return found


def _is_view(parameter: torch.Tensor, entry: UnitEntry, flat: torch.Tensor) -> bool:
    # Elements of `flat` are counted from its own beginning, wherever in its storage that is.
    return (
        parameter.untyped_storage()._cdata == flat.untyped_storage()._cdata
        and parameter.storage_offset() == flat.storage_offset() + entry.offset
        and parameter.stride() == entry.stride
    )


def _units(named: Mapping[str, torch.nn.Parameter], multiple: int) -> tuple[Unit, ...]:
    members: dict[tuple[str, torch.dtype, str, bool], list[list[str]]] = {}
    for together in _side_by_side(named):
        parameter = named[together[0]]
        trained = any(named[member].requires_grad for member in together)
        kind = (unit_name(together[0], parameter), parameter.dtype, str(parameter.device), trained)
        members.setdefault(kind, []).append(together)
    units: dict[str, Unit] = {}
    for (name, dtype, device, trained), groups in members.items():
        if name in units:  # a layer with parameters of two kinds
            name = ":".join((name, str(dtype).removeprefix("torch."), device, "trained" if trained else "frozen"))
        units[name] = _lay_out(name, dtype, groups, named, multiple)
    return tuple(units.values())


def unit_name(name: str, parameter: torch.Tensor) -> str:
    if parameter.ndim < 2:
        return VECTORS
    if ".lora_" in name:
        return ADAPTERS
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1]) if number is not None else name.removesuffix(".weight")


def _side_by_side(named: Mapping[str, torch.nn.Parameter]) -> Iterator[list[str]]:
    """Names in the order of the model, those together that are to be one matrix."""
    done: set[str] = set()
    plain = {_without_adapter(name): name for name in named}
    for name, parameter in named.items():
        if name in done:
            continue
        together = _siblings(name, named, plain)
        sizes = [named[other].numel() for other in together]
        # A matrix begins on a block: its optimizer state may have 8 bits, in blocks. That of vectors is laid out apart.
        if parameter.ndim >= 2 and any(size % BLOCK for size in sizes[:-1]):
            together = [name]
        done.update(together)
        yield together


def _siblings(name: str, named: Mapping[str, torch.nn.Parameter], plain: Mapping[str, str]) -> list[str]:
    """The parameters that a parameter is joined with, itself among them, in the order in which they are joined."""
    parts = _without_adapter(name).split(".")
    for kinds in JOINED if ".lora_" not in name else ():
        for at, part in enumerate(parts):
            if part in kinds:
                others = [plain.get(".".join((*parts[:at], kind, *parts[at + 1 :]))) for kind in kinds]
                alike = [other for other in others if other is not None and _joins(named[other], named[name])]
                return alike if alike == others else [name]
    return [name]


def _without_adapter(name: str) -> str:
    """The name that a parameter had before PEFT wrapped its layer."""
    return name.replace(".base_layer.", ".")


def _joins(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = (a.dtype, a.device, a.ndim) == (b.dtype, b.device, b.ndim)
    return same_kind and a.ndim > 0 and a.shape[1:] == b.shape[1:] and a.is_contiguous() and b.is_contiguous()


def _lay_out(
    name: str, dtype: torch.dtype, groups: list[list[str]], named: Mapping[str, torch.nn.Parameter], multiple: int
) -> Unit:
    entries, offset = [], 0
    for together in groups:
        offset = round_up(offset, BLOCK)
        for member in together:
            parameter = named[member]
            stride = parameter.stride() if _is_dense(parameter) else _contiguous(parameter.shape)
            entries.append(UnitEntry(member, tuple(parameter.shape), tuple(stride), offset))
            offset += parameter.numel()
    return Unit(name, dtype, tuple(entries), round_up(max(offset, 1), multiple))


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Its elements are all there is from its first to its last, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
