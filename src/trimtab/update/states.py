"""What an optimizer remembers of its parameters, and how that lies in memory.

The state of a unit (model/weights.py) has the unit's layout: a few matrices with a column an element (or a block of elements), so
that any stretch of columns can be taken elsewhere and worked on there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trimtab.model.weights import Entry, Unit, WeightStore
from trimtab.update.eightbit import BLOCK

MakeZeros = Callable[[tuple[int, int], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Member:
    """A trained parameter, its place in the unit, and its own part of the unit's state."""

    entry: Entry
    parameter: torch.nn.Parameter
    step: torch.Tensor
    count: torch.Tensor
    """Room for a copy of `step`: the kernel counts, and would once for every piece of a step that is done in pieces."""
    parts: dict[str, torch.Tensor]
    """Laid out as the parameter is, but codes and scales as memory is."""

    @property
    def name(self) -> str:
        return self.entry.name


@dataclass(frozen=True)
class UnitState:
    """A unit's state. `state`: one matrix with a row for each moment and, if it has them, masters; or, with 8-bit moments, codes,
    their blocks' scales, and masters."""

    unit: Unit
    members: list[Member]
    weight_decay: float
    state: tuple[torch.Tensor, ...]
    has_masters: bool
    eight_bit: bool

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.state)

    @property
    def dtype(self) -> torch.dtype:
        """What a step computes in."""
        return wide(self.unit.dtype)

    def pieces(self, size: int) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
        """The state cut into stretches of so many elements, a multiple of a block, each with its first element's number."""
        assert size % BLOCK == 0
        cut = [matrix.split(size * matrix.shape[1] // self.unit.size, dim=1) for matrix in self.state]
        return [(index * size, piece) for index, piece in enumerate(zip(*cut, strict=True))]

    def moved(self, state: tuple[torch.Tensor, ...]) -> UnitState:
        """The same with its state elsewhere."""
        members = [replace(m, parts=_parts(state, m.entry, self.eight_bit)) for m in self.members]
        return replace(self, members=members, state=state)


def make_state(
    weights: WeightStore, unit: Unit, weight_decay: float, eight_bit: bool, make_zeros: MakeZeros
) -> UnitState:
    """State of a unit, with moments of zero and masters that are what the parameters are. `eight_bit`: of matrices. Vectors are
    few, and joined at any element, so their moments are always full."""
    masters, columns, dtype = int(needs_master(unit.dtype)), unit.size, wide(unit.dtype)
    eight_bit = eight_bit and unit.decayed
    if eight_bit:
        shapes = [(2, columns, torch.uint8), (2, columns // BLOCK, torch.float32)] + [(1, columns, dtype)] * masters
    else:
        shapes = [(2 + masters, columns, dtype)]
    state = tuple(make_zeros((rows, wide_columns), kind) for rows, wide_columns, kind in shapes)
    device = weights.flats[unit.name].device
    members = []
    for entry in unit.entries:
        parameter = weights.parameters[entry.name]
        if not parameter.requires_grad:
            continue
        parts = _parts(state, entry, eight_bit)
        step, count = (torch.zeros((), dtype=torch.float32, device=device) for _ in range(2))
        members.append(Member(entry, parameter, step, count, parts))
        if masters:
            parts["master"].copy_(parameter.detach())
    return UnitState(unit, members, weight_decay if unit.decayed else 0.0, state, bool(masters), eight_bit)


def needs_master(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _parts(state: tuple[torch.Tensor, ...], entry: Entry, eight_bit: bool) -> dict[str, torch.Tensor]:
    """A parameter's own of its unit's state."""
    if not eight_bit:
        return dict(zip(("exp_avg", "exp_avg_sq", "master"), map(entry.view, state[0])))
    blocks = slice(entry.offset // BLOCK, -(-entry.end // BLOCK))
    found = {}
    for name, codes, scales in zip(("exp_avg", "exp_avg_sq"), state[0], state[1]):
        found[f"{name}_codes"] = codes[blocks.start * BLOCK : blocks.stop * BLOCK]
        found[f"{name}_scales"] = scales[blocks]
    return found | ({"master": entry.view(state[2][0])} if len(state) == 3 else {})
