"""What an optimizer remembers of its parameters, and how that lies in memory.

The state of a unit (model/weights.py) is a few matrices with a column an element (or a block of elements), so that any stretch of
columns can be taken elsewhere and worked on there. It has the unit's layout, except that joined vectors (biases) begin on blocks
of their own: blocks of 8 bits hold values of one parameter only, and a cut is a multiple of a block into every parameter.

Where ranks share the state, each has a stretch of every unit of matrices, and all of the units of vectors and adapters, which are
small. A stretch begins and ends on a block, so 8-bit state is the same for any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from trimtab.model.sizes import BLOCK
from trimtab.model.weights import ADAPTERS, Place, Unit, UnitEntry, WeightStore, round_up
from trimtab.update.peers import ALONE, Peers

MakeZeros = Callable[[tuple[int, int], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class ParameterState:
    """A trained parameter and its own part of its unit's state."""

    entry: UnitEntry
    parameter: torch.nn.Parameter
    start: int
    """Its first element's column in the state."""
    step: torch.Tensor
    count: torch.Tensor
    """Room for a copy of `step`: the kernel counts, and would once for every piece of a step that is done in pieces."""
    parts: dict[str, torch.Tensor]
    """Laid out as the parameter is, but codes and scales as memory is. Empty where other ranks share the unit's state."""

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def end(self) -> int:
        return self.start + self.entry.count


@dataclass(frozen=True)
class UnitState:
    """A unit's state. `state`: one matrix with a row for each moment and, if it has them, masters; or, with 8-bit moments, codes,
    their blocks' scales, and masters."""

    unit: Unit
    members: list[ParameterState]
    steps: torch.Tensor
    """Of which `ParameterState.step` are views, in the order of members."""
    weight_decay: float
    state: tuple[torch.Tensor, ...]
    has_masters: bool
    eight_bit: bool
    first: int = 0
    """Column of the unit at which this rank's state begins."""
    shared: bool = False
    """Other ranks have the rest of the unit's state."""

    @property
    def columns(self) -> int:
        """Of the state that is here."""
        return self.state[0].shape[1]

    def stretch(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a flat tensor, laid out as the unit is, whose state is here."""
        return flat[self.first : self.first + self.columns] if self.shared else flat

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.state)

    @property
    def dtype(self) -> torch.dtype:
        """What a step computes in."""
        return wide(self.unit.dtype)

    @property
    def rows(self) -> dict[str, torch.Tensor]:
        """The flat tensors that make up the state, by what they hold."""
        return _rows(self.state, self.eight_bit)

    def pieces(self, size: int) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
        """The state cut into stretches of so many elements, a multiple of a block, each with its first element's column."""
        assert size % BLOCK == 0
        cut = [matrix.split(size * matrix.shape[1] // self.columns, dim=1) for matrix in self.state]
        return [(self.first + index * size, piece) for index, piece in enumerate(zip(*cut, strict=True))]

    def moved(self, state: tuple[torch.Tensor, ...]) -> UnitState:
        """The same with its state elsewhere."""
        rows = {} if self.shared else _rows(state, self.eight_bit)
        return replace(
            self, members=[replace(m, parts=parts_of(rows, m.entry, m.start)) for m in self.members], state=state
        )


def make_state(
    weights: WeightStore,
    unit: Unit,
    weight_decay: float,
    eight_bit: bool,
    make_zeros: MakeZeros,
    peers: Peers = ALONE,
) -> UnitState:
    """State of a unit's trained parameters, with moments of zero and masters that are what the parameters are."""
    trained = [entry for entry in unit.entries if weights.parameters[entry.name].requires_grad]
    starts, columns = _starts(trained)
    first, shared = 0, peers.shards > 1 and is_shared(weights, unit)
    if shared:
        assert starts == [entry.offset for entry in trained], "matrices begin on blocks"
        columns = unit.size // peers.shards
        first = peers.shard * columns
    masters, dtype = int(needs_master(unit.dtype)), wide(unit.dtype)
    if eight_bit:
        shapes = [(2, columns, torch.uint8), (2, columns // BLOCK, torch.float32)] + [(1, columns, dtype)] * masters
    else:
        shapes = [(2 + masters, columns, dtype)]
    state = tuple(make_zeros((rows, width), kind) for rows, width, kind in shapes)
    steps, counts = torch.zeros((2, len(trained)), dtype=torch.float32, device=weights.flats[unit.name].device)
    rows = _rows(state, eight_bit)
    if masters and shared:
        rows["master"].copy_(weights.flats[unit.name][first : first + columns])
    members = []
    for index, (entry, start) in enumerate(zip(trained, starts)):
        parameter = weights.parameters[entry.name]
        parts = {} if shared else parts_of(rows, entry, start)
        members.append(ParameterState(entry, parameter, start, steps[index], counts[index], parts))
        if "master" in parts:
            parts["master"].copy_(parameter.detach())
    decay = weight_decay if unit.decayed else 0.0
    return UnitState(unit, members, steps, decay, state, bool(masters), eight_bit, first, shared)


def is_shared(weights: WeightStore, unit: Unit) -> bool:
    """Ranks may share the unit's state: it is large, and lies in memory as the weights do. So not vectors, whose state begins on
    blocks of its own, nor adapters, nor what is partly frozen."""
    trained = all(weights.parameters[entry.name].requires_grad for entry in unit.entries)
    return trained and unit.decayed and not unit.name.startswith(ADAPTERS)


def needs_master(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _starts(entries: Iterable[UnitEntry]) -> tuple[list[int], int]:
    """Each parameter's first column, on a block, and the number of all columns."""
    starts, end = [], 0
    for entry in entries:
        starts.append(end)
        end += round_up(entry.count, BLOCK)
    return starts, end


def _rows(state: tuple[torch.Tensor, ...], eight_bit: bool) -> dict[str, torch.Tensor]:
    if not eight_bit:
        return dict(zip(("exp_avg", "exp_avg_sq", "master"), state[0]))
    found = {f"{name}_codes": codes for name, codes in zip(("exp_avg", "exp_avg_sq"), state[0])}
    found |= {f"{name}_scales": scales for name, scales in zip(("exp_avg", "exp_avg_sq"), state[1])}
    return found | ({"master": state[2][0]} if len(state) == 3 else {})


def parts_of(rows: dict[str, torch.Tensor], entry: UnitEntry, start: int) -> dict[str, torch.Tensor]:
    """A parameter's own of its unit's state."""
    end = start + round_up(entry.count, BLOCK)
    found = {}
    for name, row in rows.items():
        if name.endswith("_codes"):
            found[name] = row[start:end]
        elif name.endswith("_scales"):
            found[name] = row[start // BLOCK : end // BLOCK]
        else:
            found[name] = entry.view(row, start)
    return found


def by_parameter(tensors: Mapping[str, torch.Tensor], table: Iterable[Place]) -> dict[str, torch.Tensor]:
    """The tensors of units cut into those of parameters."""
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, unit = name.partition("/")
        kinds.setdefault(unit, {})[kind] = tensor
    found, numbers = {}, Counter[str]()
    for place in table:
        rows = dict(kinds.get(place.unit, {}))
        if "step" in rows:
            found[f"step/{place.name}"] = rows.pop("step")[numbers[place.unit]]
        numbers[place.unit] += 1
        entry = UnitEntry(place.name, place.shape, place.stride, place.offset)
        found |= {f"{kind}/{place.name}": part for kind, part in parts_of(rows, entry, place.offset).items()}
    return found
