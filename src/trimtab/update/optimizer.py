"""AdamW on float32 master weights, one step at a time, all or nothing.

Guarantees: gradients add up in float32 whatever the model's type, so the number of micro-batches does not matter; the norm is
that of the whole step; a step whose gradient is not finite leaves weights, moments and step count exactly as they were. In
float32 (and wider) models the parameters are their own masters. Masters and moments (states.py) are on the device or,
offloaded, in host memory, from where a step streams them through the device; the result is the same bit for bit. Moments of 8
bits (eightbit.py) are made whole, stepped and stored again a chunk at a time, so they never all exist in full.

A step has two halves and cannot run out of memory half-way. `prepare` allocates what the step needs beside the gradients (copies
of gradients that lie in memory otherwise than their parameters, sums that only other ranks have a gradient for, the slots of the
streamer, room for a chunk), at a time when the activations of the backward pass are gone. `apply` allocates nothing to speak of.
`applying` says whether it has begun to change weights.

With other ranks (peers.py) all gradients are summed over ranks, unit by unit, here or earlier (`begin_sum`); each rank steps
the stretch of a unit whose state it holds, and the working weights are gathered in place. The norm is one number for all ranks,
so all clip alike and skip alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw
from torch.utils.hooks import RemovableHandle

from trimtab.config.learn import Learn
from trimtab.config.reward_model import PairLearn
from trimtab.config.sft import SftLearn
from trimtab.model.gradients import Gradients
from trimtab.model.sizes import BLOCK, MAX_PIECE_ELEMENTS, MOMENT_CHUNK_ELEMENTS
from trimtab.model.transfer import HostMemory
from trimtab.model.weights import Place, Unit, WeightStore
from trimtab.update.eightbit import Room
from trimtab.update.peers import ALONE, Peers, Pending
from trimtab.update.state_streamer import StateStreamer
from trimtab.update.states import ParameterState, UnitState, by_parameter, flat, make_state, needs_master

AnyLearn = Learn | SftLearn | PairLearn
Fill = Callable[[torch.Tensor, str, Sequence[Place], int], bool]


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: float
    applied: bool


@dataclass(frozen=True)
class _Prepared:
    """What `apply` works with."""

    grads: dict[int, torch.Tensor]
    """By a parameter's id."""
    touched: torch.Tensor | None
    """With other ranks: for each parameter 1 where this rank has a gradient."""
    pieces: list[Piece]
    slots: list[torch.Tensor]
    rooms: dict[torch.dtype, Room]


@dataclass(frozen=True)
class Piece:
    """A stretch of a unit's state."""

    unit: UnitState
    first: int
    """Number of its first element."""
    state: tuple[torch.Tensor, ...]


class MasterAdamW:
    """Owns masters, gradients and moments of the trained parameters of a model."""

    def __init__(self, weights: WeightStore, learn: AnyLearn, *, offload: bool = False, peers: Peers = ALONE) -> None:
        self.weights, self.peers = weights, peers
        self.params = [p for p in weights.parameters.values() if p.requires_grad]
        self.max_grad_norm = learn.max_grad_norm
        self._settings = learn.optimizer
        apart = [p for p in self.params if peers.ranks > 1 or needs_master(p.dtype)]
        self.gradients = Gradients(weights, apart)
        """Where products may add a gradient themselves; what autograd makes is taken over by hooks."""
        self._hooks = [_take_over(parameter, self.gradients) for parameter in apart]
        self._device = self.params[0].device if self.params else torch.device("cpu")
        self._streamer = StateStreamer(self._device) if offload else None
        self.piece = MAX_PIECE_ELEMENTS
        self.applying = False
        """Weights or state are being changed; after an error, they may have been in part."""
        self.begun = 0
        """Steps that have begun to change weights or state."""
        self._prepared: _Prepared | None = None
        self.reduced: Mapping[str, torch.Tensor] = {}
        """By unit: gradients of this rank's stretch that are summed over ranks already (early_reduction.py)."""
        self._begun_sums: dict[str, Pending] = {}
        """By unit: sums over ranks that run beside the backward pass (overlapped_reduction.py)."""
        self._memories: list[HostMemory] = []
        self._units = [
            make_state(weights, unit, self._settings.weight_decay, self.eight_bit, self._room, peers)
            for unit in weights.units
            if any(weights.parameters[entry.name].requires_grad for entry in unit.entries)
        ]

    @property
    def units(self) -> list[Unit]:
        """Units that are trained."""
        return [unit.unit for unit in self._units]

    @property
    def shared_units(self) -> list[Unit]:
        """Units whose state ranks share."""
        return [unit.unit for unit in self._units if unit.shared]

    @property
    def prepared(self) -> bool:
        """`apply` can follow."""
        return self._prepared is not None

    @property
    def eight_bit(self) -> bool:
        return self._settings.states == "8bit"

    @property
    def offloaded(self) -> bool:
        return self._streamer is not None

    @property
    def state_bytes(self) -> int:
        """Bytes of masters and moments, wherever they are."""
        return sum(unit.nbytes for unit in self._units)

    def offload(self) -> None:
        """From now on masters and moments wait in host memory, as if they always had. If that is short too, nothing changes."""
        if self.offloaded:
            return
        memories = [[HostMemory(matrix.nbytes, self._device) for matrix in unit.state] for unit in self._units]
        self._units = [
            unit.moved(tuple(m.tensor(tuple(t.shape), t.dtype).copy_(t) for m, t in zip(own, unit.state)))
            for unit, own in zip(self._units, memories)
        ]
        self._streamer, self._memories = StateStreamer(self._device), [memory for own in memories for memory in own]

    def _room(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for state, where it is kept."""
        if self._streamer is None:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        self._memories.append(HostMemory(shape[0] * shape[1] * dtype.itemsize, self._device))
        return self._memories[-1].tensor(shape, dtype).zero_()

    def grads(self) -> list[torch.Tensor | None]:
        """The gradient of each parameter so far, summed in float32 or wider; None where there is none."""
        return [self.gradients.get(p) if p in self.gradients else p.grad for p in self.params]

    def masters(self) -> list[torch.Tensor]:
        """The float32 (or wider) weights, in the order of `params`, wherever they are."""
        self._settle()
        found = {id(m.parameter): m.parts.get("master", m.parameter) for unit in self._units for m in unit.members}
        return [found[id(p)] for p in self.params]

    def step(self, lr: float) -> StepOutcome:
        """Apply the accumulated gradient at the given rate, then clear it."""
        self.prepare()
        return self.apply(lr)

    @torch.no_grad()
    def prepare(self) -> None:
        """First half: allocate all that `apply` needs. Changes nothing and asks nothing of other ranks."""
        self._lay_out_gradients()
        touched = None
        if self.peers.ranks > 1:
            marks = [float(self.gradients.touched(p)) for p in self.params]
            touched = torch.tensor(marks, dtype=torch.float32, device=self._device)
            grads = {}
            for unit in self._units:
                for member in unit.members:
                    early = unit.unit.name in self.reduced
                    whole = self.reduced[unit.unit.name] if early else self.gradients.view(member.parameter)
                    grads[id(member.parameter)] = whole
        else:
            grads = {id(p): grad for p, grad in zip(self.params, self.grads()) if grad is not None}
        pieces, slots = self._pieces(grads)
        self._prepared = _Prepared(grads, touched, pieces, slots, self._chunk_rooms())

    @torch.no_grad()
    def apply(self, lr: float) -> StepOutcome:
        """Second half: step, then clear the gradient. All ranks call it, or none."""
        assert self._prepared is not None, "prepare comes first"
        prepared, self._prepared = self._prepared, None
        grads = prepared.grads
        if prepared.touched is not None:
            self._sum_over_ranks(prepared.touched)
            trained = {id(p) for p, mark in zip(self.params, prepared.touched.tolist()) if mark}
            grads = {key: grad for key, grad in grads.items() if key in trained}
            norm = self._norm_over_ranks()
        else:
            norm = torch.nn.utils.get_total_norm(grads.values()) if grads else torch.zeros(())
        applied = bool(torch.isfinite(norm))
        if applied and grads:
            factor = None if self.max_grad_norm is None else _clip_factor(self.max_grad_norm, norm).to(self._device)
            self.begun += 1
            self.applying = True
            if factor is not None:
                self._scale(grads, factor)
            self._step_whole(grads, lr)
            self._step_in_pieces(prepared.pieces, grads, lr, prepared.slots, prepared.rooms)
            for unit in self._units:
                if unit.shared and self._members(unit, grads):
                    self.peers.gather(self.weights.flats[unit.unit.name])
            self.applying = False
        self.zero_grad()
        return StepOutcome(float(norm), applied)

    @torch.no_grad()
    def begin_sum(self, name: str) -> None:
        """The gradient of a unit is complete: sum it over ranks from now on, beside what follows. All ranks begin the same units,
        in the same order."""
        unit = next(unit for unit in self._units if unit.unit.name == name)
        self.gradients.complete(member.parameter for member in unit.members)
        begin = self.peers.begin_sum_into_parts if unit.shared else self.peers.begin_sum
        self._begun_sums[name] = begin(self.gradients.sums[name])

    def lose_begun_sums(self) -> None:
        """The ranks that they were begun with have parted."""
        self._begun_sums = {}

    def _sum_over_ranks(self, touched: torch.Tensor) -> None:
        """Sums of all ranks in the place of this rank's, and which parameters any of them has a gradient for."""
        self.peers.sum(touched)
        for unit in self._units:
            name = unit.unit.name
            if name in self._begun_sums:
                self._begun_sums.pop(name).wait()
            elif name not in self.reduced:
                (self.peers.sum_into_parts if unit.shared else self.peers.sum)(self.gradients.sums[name])

    def _own_gradient(self, unit: UnitState) -> torch.Tensor:
        """With other ranks: the gradient of the elements whose state is here, flat."""
        early = self.reduced.get(unit.unit.name)
        return unit.stretch(self.gradients.sums[unit.unit.name]) if early is None else early

    def _norm_over_ranks(self) -> torch.Tensor:
        """The norm of the whole step: each stretch is counted by the rank that holds it. In float64, so that the order in which
        ranks add up does not matter."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._device)
        for unit in self._units:
            part = self._own_gradient(unit)
            squares[int(unit.shared)] += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        whole, parts = squares[:1], squares[1:]
        self.peers.sum_of_parts(parts)
        return (whole + parts).sqrt()[0]

    def _scale(self, grads: dict[int, torch.Tensor], factor: torch.Tensor) -> None:
        if self.peers.ranks == 1:
            torch._foreach_mul_(list(grads.values()), factor)
            return
        for unit in self._units:
            self._own_gradient(unit).mul_(factor)

    def _lay_out_gradients(self) -> None:
        """Gradients that autograd made lie in memory as their parameters do: the kernel walks through both. One at a time."""
        for parameter in self.params:
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.grad.dtype, device=parameter.device
                ).copy_(parameter.grad)

    def _chunk_rooms(self) -> dict[torch.dtype, Room]:
        """Room for a chunk of 8-bit moments in full, by what they are stepped in."""
        if not self.eight_bit:
            return {}
        sizes: dict[torch.dtype, int] = {}
        for unit in self._units:
            sizes[unit.dtype] = max(sizes.get(unit.dtype, 0), min(MOMENT_CHUNK_ELEMENTS, unit.columns))
        return {dtype: Room(size, dtype, self._device) for dtype, size in sizes.items()}

    def _members(self, unit: UnitState, grads: dict[int, torch.Tensor]) -> list[ParameterState]:
        """The parameters of a unit that have a gradient."""
        return [member for member in unit.members if id(member.parameter) in grads]

    def _step_whole(self, grads: dict[int, torch.Tensor], lr: float) -> None:
        """AdamW on units whose state is here in full; masters are rounded into the working weights, which the engine reads."""
        alike: dict[tuple[float, torch.dtype, bool], list[ParameterState]] = {}
        for unit in self._units if self._streamer is None else ():
            if not unit.eight_bit and not unit.shared:
                alike.setdefault((unit.weight_decay, unit.dtype, unit.has_masters), []).extend(
                    self._members(unit, grads)
                )
        for (decay, _, has_masters), members in alike.items():
            if not members:
                continue
            weights = [m.parts["master"] if has_masters else m.parameter.data for m in members]
            moments = [[m.parts["exp_avg"], m.parts["exp_avg_sq"]] for m in members]
            self._adamw(
                decay, weights, [grads[id(m.parameter)] for m in members], moments, [m.step for m in members], lr
            )
            if has_masters:
                torch._foreach_copy_([m.parameter for m in members], weights)

    def _pieces(self, grads: dict[int, torch.Tensor]) -> tuple[list[Piece], list[torch.Tensor]]:
        """Pieces of the units whose state is on the host, in 8 bits or shared with other ranks, and the device memory that those
        on the host pass through."""
        pieces = [
            Piece(unit, first, state)
            for unit in self._units
            if (self._streamer is not None or unit.eight_bit or unit.shared) and self._members(unit, grads)
            for first, state in unit.pieces(self.piece if self._streamer is not None else unit.columns)
        ]
        if self._streamer is None:
            return pieces, []
        return pieces, self._streamer.slots([piece.state for piece in pieces])

    def _step_in_pieces(
        self,
        pieces: Sequence[Piece],
        grads: dict[int, torch.Tensor],
        lr: float,
        slots: list[torch.Tensor],
        rooms: dict[torch.dtype, Room],
    ) -> None:
        def work(index: int, state: tuple[torch.Tensor, ...]) -> None:
            piece = pieces[index]
            self._step_piece(piece.unit, piece.first, state, grads, lr, rooms.get(piece.unit.dtype))

        if self._streamer is None:
            for index, piece in enumerate(pieces):
                work(index, piece.state)
        elif pieces:
            self._streamer.run([piece.state for piece in pieces], work, slots)
        stepped = {id(piece.unit): piece.unit for piece in pieces}
        steps = [m.step for unit in stepped.values() for m in self._members(unit, grads)]
        if steps:
            torch._foreach_add_(steps, 1.0)

    def _step_piece(
        self, unit: UnitState, first: int, piece: tuple[torch.Tensor, ...], grads: dict[int, torch.Tensor], lr: float,
        room: Room | None,
    ) -> None:  # fmt: skip
        """The same for a stretch of a unit's state, which is here and begins at element `first`."""
        if not unit.eight_bit:
            rows = piece[0]
            self._step_stretch(unit, first, rows[:2], rows[2] if unit.has_masters else None, grads, lr)
            return
        assert room is not None
        codes, scales = piece[:2]
        for at in range(0, codes.shape[1], room.size):
            here = slice(at, at + room.size)
            blocks = slice(at // BLOCK, (at + room.size) // BLOCK)
            moments = room.load(codes[:, here], scales[:, blocks])
            masters = piece[2][0, here] if unit.has_masters else None
            self._step_stretch(unit, first + at, moments, masters, grads, lr)
            room.store(codes[:, here], scales[:, blocks])

    def _step_stretch(
        self, unit: UnitState, first: int, moments_2N: torch.Tensor, masters_N: torch.Tensor | None,
        grads: dict[int, torch.Tensor], lr: float,
    ) -> None:  # fmt: skip
        """It may cut a parameter: what is done is the same for every element."""
        weights, gradients, moments, copies, whose = [], [], [], [], []
        for member in self._members(unit, grads):
            begin, end = max(first, member.start), min(first + moments_2N.shape[1], member.end)
            if begin >= end:
                continue
            inside, here = slice(begin - member.start, end - member.start), slice(begin - first, end - first)
            working = flat(member.parameter.data)[inside]
            weights.append(working if masters_N is None else masters_N[here])
            if unit.shared:
                gradients.append(self._own_gradient(unit)[begin - unit.first : end - unit.first])
            else:
                gradients.append(flat(grads[id(member.parameter)])[inside])
            moments.append([row[here] for row in moments_2N])
            copies.append(working)
            whose.append(member)
        if not weights:
            return
        counts = [member.count for member in whose]
        torch._foreach_copy_(counts, [member.step for member in whose])
        self._adamw(unit.weight_decay, weights, gradients, moments, counts, lr)
        if unit.has_masters:
            torch._foreach_copy_(copies, weights)

    def _adamw(
        self, decay: float, weights: list[torch.Tensor], grads: list[torch.Tensor], moments: list[list[torch.Tensor]],
        steps: list[torch.Tensor], lr: float,
    ) -> None:  # fmt: skip
        settings = self._settings
        adamw(
            weights, grads, [m[0] for m in moments], [m[1] for m in moments], [], steps, fused=True, amsgrad=False,
            beta1=settings.beta1, beta2=settings.beta2, lr=lr, weight_decay=decay, eps=settings.eps, maximize=False,
        )  # fmt: skip

    def zero_grad(self) -> None:
        while self._begun_sums:  # they still use the memory
            self._begun_sums.popitem()[1].drop()
        self._prepared, self.reduced = None, {}
        for parameter in self.params:
            parameter.grad = None
        self.gradients.clear()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything beyond the working weights that a resumed run needs, by unit: flat tensors called KIND/UNIT, which `table`
        says the contents of, and `step/UNIT`, one number a parameter."""
        self._settle()
        tensors: dict[str, torch.Tensor] = {}
        for unit in self._units:
            if self._writes(unit):
                tensors[f"step/{unit.unit.name}"] = unit.steps
                tensors |= {f"{kind}/{unit.unit.name}": row for kind, row in unit.rows.items()}
        return tensors

    def _writes(self, unit: UnitState) -> bool:
        """One of the ranks that hold the same state is enough to save it."""
        return self.peers.rank < (self.peers.shards if unit.shared else 1)

    def table(self) -> list[Place]:
        """Where each parameter lies in the flat tensors of `state_tensors`."""
        return [
            Place(
                unit.unit.name,
                m.name,
                m.entry.shape,
                m.entry.stride,
                str(unit.unit.dtype).removeprefix("torch."),
                m.start,
            )
            for unit in self._units
            for m in unit.members
        ]

    def stretches(self) -> dict[str, tuple[int, int]]:
        """Of units that other ranks share: the first element whose state is here, and how many are."""
        return {
            unit.unit.name: (unit.first, unit.columns) for unit in self._units if unit.shared and self._writes(unit)
        }

    def state_of_parameters(self) -> dict[str, torch.Tensor]:
        """The state as format 1 of checkpoints names it: KIND/PARAMETER."""
        self._settle()
        tensors: dict[str, torch.Tensor] = {}
        for unit in self._units:
            for member in unit.members:
                tensors[f"step/{member.name}"] = member.step
                tensors |= {f"{kind}/{member.name}": part for kind, part in member.parts.items()}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor], table: Sequence[Place] | None) -> None:
        """Take over what `state_tensors` and `table` gave, however units were cut then; without a table, tensors by parameter.
        Moments that are not in it are as in the beginning."""
        found = tensors if table is None else by_parameter(tensors, table)
        for name, own in self.state_of_parameters().items():
            if name in found:
                own.copy_(found[name])
            else:
                assert not name.startswith("master/"), f"no {name} in the checkpoint"
                own.zero_()
        for unit in self._units:
            if unit.has_masters and not unit.shared:
                for member in unit.members:
                    member.parameter.copy_(member.parts["master"])

    @torch.no_grad()
    def load_stretches(self, fill: Fill) -> None:
        """Take over the state of units that other ranks share. `fill` fills a flat tensor with state of a kind, for parameters at
        the places it is given, from an element of the unit on; False where there is none of that kind."""
        self._settle()
        for unit in self._units:
            places = [place for place in self.table() if place.unit == unit.unit.name]
            for kind, row in unit.rows.items() if unit.shared else ():
                if not fill(row, kind, places, unit.first):
                    assert kind != "master", f"no masters of {unit.unit.name} in the checkpoint"
                    row.zero_()

    def _settle(self) -> None:
        if self._streamer is not None:
            self._streamer.settle()


def _take_over(parameter: torch.nn.Parameter, gradients: Gradients) -> RemovableHandle:
    """What autograd makes goes to the sums, as long as there are any. The hook holds them weakly: they hold the parameter."""
    others = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if any(getattr(hook, "taken", lambda: None)() is not None for hook in others.values()):
        raise RuntimeError("these parameters have an optimizer already")
    reference = weakref.ref(gradients)

    def hook(grown: torch.Tensor) -> None:
        found = reference()
        if found is not None:
            found.add(grown)

    hook.taken = reference  # type: ignore[attr-defined]
    return parameter.register_post_accumulate_grad_hook(hook)


def _clip_factor(most: float, norm: torch.Tensor) -> torch.Tensor:
    """most / norm where that is below one, as torch's clipping has it."""
    return torch.clamp(most / (norm + 1e-6), max=1.0)
