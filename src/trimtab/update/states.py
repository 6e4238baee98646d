"""What an optimizer remembers of its parameters, and how that lies in memory.

Parameters that are stepped alike are a group, and a group's state is a few matrices with a column an element (or a block of
elements), so that any stretch of columns can be taken elsewhere and worked on there. A parameter's own state begins on a column
that kernels, and blocks, can begin on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from trimtab.update.eightbit import BLOCK

ALIGNED = 64
"""Elements to a multiple of which a parameter's state begins, so that kernels read it in whole lines."""
Room = Callable[[tuple[int, int], torch.dtype], torch.Tensor]
"""Makes a matrix of zeros."""


@dataclass(frozen=True)
class Member:
    """A parameter and where its state begins in that of its group."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    step: torch.Tensor
    count: torch.Tensor
    """Room for a copy of `step`: the kernel counts, and would once for every piece of a step that is done in pieces."""
    parts: dict[str, torch.Tensor]
    """Its own of the group's state, as checkpoints have it: laid out as the parameter is, but codes and scales as memory is."""

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(frozen=True)
class Group:
    """Parameters that are stepped alike. `state`: one matrix with a row for each moment and, if they have them, masters; or, with
    8-bit moments, codes, their blocks' scales, and masters."""

    members: list[Member]
    weight_decay: float
    state: tuple[torch.Tensor, ...]
    has_masters: bool
    eight_bit: bool

    @property
    def columns(self) -> int:
        return self.state[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.state)

    @property
    def dtype(self) -> torch.dtype:
        """What a step computes in."""
        return wide(self.members[0].parameter)

    def pieces(self, size: int) -> list[tuple[torch.Tensor, ...]]:
        """The state cut into stretches of so many elements, which is a multiple of a block."""
        assert size % BLOCK == 0 or not self.eight_bit
        cut = [matrix.split(size * matrix.shape[1] // self.columns, dim=1) for matrix in self.state]
        return list(zip(*cut, strict=True))

    def moved(self, state: tuple[torch.Tensor, ...]) -> Group:
        """The same group with its state elsewhere."""
        members = [replace(m, parts=_parts(state, m.parameter, m.start, self.eight_bit)) for m in self.members]
        return replace(self, members=members, state=state)


def make_group(
    named: list[tuple[str, torch.nn.Parameter]], weight_decay: float, eight_bit: bool, room: Room, device: torch.device
) -> Group:
    """A group of parameters of one kind, with moments of zero and masters that are what the parameters are."""
    first, unit = named[0][1], BLOCK if eight_bit else ALIGNED
    starts = [0, *accumulate(-(-p.numel() // unit) * unit for _, p in named)]
    masters = int(needs_master(first))
    if eight_bit:
        shapes = [(2, starts[-1], torch.uint8), (2, starts[-1] // BLOCK, torch.float32)]
        shapes += [(1, starts[-1], wide(first))] * masters
    else:
        shapes = [(2 + masters, starts[-1], wide(first))]
    state = tuple(room((rows, columns), dtype) for rows, columns, dtype in shapes)
    members = []
    for (name, parameter), start in zip(named, starts):
        parts = _parts(state, parameter, start, eight_bit)
        step, count = (torch.zeros((), dtype=torch.float32, device=device) for _ in range(2))
        members.append(Member(name, parameter, start, step, count, parts))
        if masters:
            parts["master"].copy_(parameter.detach())
    return Group(members, weight_decay, state, bool(masters), eight_bit)


def needs_master(parameter: torch.Tensor) -> bool:
    return parameter.dtype.itemsize < 4


def wide(parameter: torch.Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def is_dense(tensor: torch.Tensor) -> bool:
    """Its elements are all there is from its first to its last, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _parts(
    state: tuple[torch.Tensor, ...], parameter: torch.Tensor, start: int, eight_bit: bool
) -> dict[str, torch.Tensor]:
    """A parameter's own of its group's state."""

    def laid_out(row: torch.Tensor) -> torch.Tensor:
        return row.as_strided(parameter.shape, parameter.stride(), row.storage_offset() + start)

    if not eight_bit:
        return dict(zip(("exp_avg", "exp_avg_sq", "master"), map(laid_out, state[0])))
    blocks = slice(start // BLOCK, -(-(start + parameter.numel()) // BLOCK))
    found = {}
    for name, codes, scales in zip(("exp_avg", "exp_avg_sq"), state[0], state[1]):
        found[f"{name}_codes"] = codes[blocks.start * BLOCK : blocks.stop * BLOCK]
        found[f"{name}_scales"] = scales[blocks]
    return found | ({"master": laid_out(state[2][0])} if len(state) == 3 else {})
